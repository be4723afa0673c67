//go:build cgo && linux && !noverbs

// Calls into libibverbs and librdmacm, which are opened at run time. Functions that the headers of
// rdma-core define inline go through the operation table of the context, as those do.

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include "shim.h"

#define VERBS(X) \
	X(struct vb_device **, ibv_get_device_list, (int *)) \
	X(void, ibv_free_device_list, (struct vb_device **)) \
	X(struct vb_context *, ibv_open_device, (struct vb_device *)) \
	X(int, ibv_close_device, (struct vb_context *)) \
	X(int, ibv_query_device, (struct vb_context *, struct vb_device_attr *)) \
	X(int, ibv_get_async_event, (struct vb_context *, struct vb_async_event *)) \
	X(void, ibv_ack_async_event, (struct vb_async_event *)) \
	X(void *, ibv_alloc_pd, (struct vb_context *)) \
	X(int, ibv_dealloc_pd, (void *)) \
	X(struct vb_mr *, ibv_reg_mr, (void *, void *, size_t, int)) \
	X(int, ibv_dereg_mr, (struct vb_mr *)) \
	X(struct vb_channel *, ibv_create_comp_channel, (struct vb_context *)) \
	X(int, ibv_destroy_comp_channel, (struct vb_channel *)) \
	X(struct vb_cq *, ibv_create_cq, (struct vb_context *, int, void *, struct vb_channel *, int)) \
	X(int, ibv_destroy_cq, (struct vb_cq *)) \
	X(int, ibv_get_cq_event, (struct vb_channel *, struct vb_cq **, void **)) \
	X(void, ibv_ack_cq_events, (struct vb_cq *, unsigned)) \
	X(struct vb_qp *, ibv_create_qp, (void *, struct vb_qp_init_attr *)) \
	X(int, ibv_destroy_qp, (struct vb_qp *)) \
	X(int, ibv_modify_qp, (struct vb_qp *, struct vb_qp_attr *, int)) \
	X(int, ibv_query_qp, (struct vb_qp *, struct vb_qp_attr *, int, struct vb_qp_init_attr *))

#define RDMACM(X) \
	X(struct vb_cm_channel *, rdma_create_event_channel, (void)) \
	X(int, rdma_get_cm_event, (struct vb_cm_channel *, struct vb_cm_event **)) \
	X(int, rdma_ack_cm_event, (struct vb_cm_event *)) \
	X(int, rdma_create_id, (struct vb_cm_channel *, struct vb_cm_id **, void *, int)) \
	X(int, rdma_destroy_id, (struct vb_cm_id *)) \
	X(int, rdma_set_option, (struct vb_cm_id *, int, int, void *, size_t)) \
	X(int, rdma_bind_addr, (struct vb_cm_id *, void *)) \
	X(int, rdma_resolve_addr, (struct vb_cm_id *, void *, void *, int)) \
	X(int, rdma_resolve_route, (struct vb_cm_id *, int)) \
	X(int, rdma_listen, (struct vb_cm_id *, int)) \
	X(int, rdma_create_qp, (struct vb_cm_id *, void *, struct vb_qp_init_attr *)) \
	X(int, rdma_connect, (struct vb_cm_id *, struct vb_conn_param *)) \
	X(int, rdma_accept, (struct vb_cm_id *, struct vb_conn_param *)) \
	X(int, rdma_reject, (struct vb_cm_id *, const void *, uint8_t)) \
	X(int, rdma_notify, (struct vb_cm_id *, int)) \
	X(struct vb_context **, rdma_get_devices, (int *)) \
	X(void, rdma_free_devices, (struct vb_context **)) \
	X(int, rdma_disconnect, (struct vb_cm_id *))

#define DECLARE(ret, name, args) static ret(*p_##name) args;
VERBS(DECLARE)
RDMACM(DECLARE)

static char missing[512];

const char *vb_load(void) {
	void *v = dlopen("libibverbs.so.1", RTLD_NOW | RTLD_LOCAL);
	void *c = v ? dlopen("librdmacm.so.1", RTLD_NOW | RTLD_LOCAL) : NULL;
	if (!v || !c) {
		const char *e = dlerror();
		strncpy(missing, e ? e : "dlopen failed", sizeof missing - 1);
		return missing;
	}
#define RESOLVE(lib, name) \
	if (!(*(void **)&p_##name = dlsym(lib, #name))) return "symbol " #name;
#define RESOLVE_V(ret, name, args) RESOLVE(v, name)
#define RESOLVE_C(ret, name, args) RESOLVE(c, name)
	VERBS(RESOLVE_V)
	RDMACM(RESOLVE_C)
	return NULL;
}

// result makes one convention of three: 0 or a positive number; a negative number; -1 and errno.
static int result(int r) {
	if (r == 0) return 0;
	if (r == -1) return errno ? errno : EIO;
	return r < 0 ? -r : r;
}

static int failed(void) { return errno ? errno : EIO; }

static int nonblocking(int fd) {
	int f = fcntl(fd, F_GETFL);
	return f < 0 || fcntl(fd, F_SETFL, f | O_NONBLOCK) < 0 ? errno : 0;
}

// --- Devices

int vb_device_open(int i, char *name, struct vb_context **ctx) {
	int n = 0, err = 0;
	errno = 0;
	struct vb_device **l = p_ibv_get_device_list(&n);
	if (!l) return failed();
	if (i >= n) {
		err = ENODEV;
		name[0] = 0;
	} else {
		memcpy(name, l[i]->name, 64);
		name[63] = 0;
		errno = 0;
		*ctx = p_ibv_open_device(l[i]);
		if (!*ctx) err = failed();
	}
	p_ibv_free_device_list(l);
	return err;
}

void vb_device_close(struct vb_context *ctx) { p_ibv_close_device(ctx); }

int vb_query(struct vb_context *ctx, struct vb_device_attr *attr) {
	memset(attr, 0, sizeof *attr);
	return result(p_ibv_query_device(ctx, attr));
}

// vb_probe_inline finds out what creating a queue pair with 4 SGEs gives.
int vb_probe_inline(struct vb_context *ctx) {
	static const int sizes[] = {512, 400, 256, 220, 188, 128, 96, 80, 64, 32, 0};
	int best = 0;
	void *pd = p_ibv_alloc_pd(ctx);
	struct vb_cq *cq = pd ? p_ibv_create_cq(ctx, 16, NULL, NULL, 0) : NULL;
	for (unsigned i = 0; cq && i < sizeof sizes / sizeof *sizes; i++) {
		struct vb_qp_init_attr a = {.send_cq = cq, .recv_cq = cq, .qp_type = VB_QPT_RC,
			.cap = {.max_send_wr = 4, .max_recv_wr = 4, .max_send_sge = 4, .max_recv_sge = 4, .max_inline_data = sizes[i]}};
		struct vb_qp *qp = p_ibv_create_qp(pd, &a);
		if (!qp) continue;
		p_ibv_destroy_qp(qp);
		// Some write back less than was asked for; what they give more depends on the rest.
		best = a.cap.max_inline_data < (uint32_t)sizes[i] ? (int)a.cap.max_inline_data : sizes[i];
		break;
	}
	if (cq) p_ibv_destroy_cq(cq);
	if (pd) p_ibv_dealloc_pd(pd);
	return best;
}

int vb_async_next(struct vb_context *ctx, struct vb_async_event *ev) {
	memset(ev, 0, sizeof *ev);
	errno = 0;
	return p_ibv_get_async_event(ctx, ev) ? failed() : 0;
}

void vb_async_ack(struct vb_async_event *ev) { p_ibv_ack_async_event(ev); }

// vb_let_go puts /dev/null in the place of a context's descriptors. The kernel removes some devices only when no
// process has them open, and librdmacm, whose the context is, keeps its contexts open. The numbers stay taken, so
// that the library can still close them.
int vb_let_go(struct vb_context *ctx, struct vb_cq *guard) {
	if (guard) p_ibv_destroy_cq(guard); // its mapping holds the file too
	int null = open("/dev/null", O_RDWR | O_CLOEXEC);
	if (null < 0) return errno;
	int err = 0;
	if (dup3(null, ctx->cmd_fd, O_CLOEXEC) < 0 || dup3(null, ctx->async_fd, O_CLOEXEC) < 0) err = errno;
	close(null);
	return err;
}

int vb_gone(struct vb_context *ctx) {
	struct stat s;
	return fstat(ctx->cmd_fd, &s) || s.st_rdev == makedev(1, 3);
}

// vb_guard is for siw. Its library takes the mapping offset 0x90000 (SIW_INVAL_UOBJ_KEY) for "no mapping", and the
// kernel gives it to whatever comes when the 144 pages below are taken: every queue that is made then fails, without
// an error number. A queue that begins one page below and stays takes the offset out of the way.
struct vb_cq *vb_guard(struct vb_context *ctx) {
	struct vb_cq *fill[512], *guard = NULL;
	int n = 0;
	while (n < 512) {
		errno = 0;
		fill[n] = p_ibv_create_cq(ctx, 1, NULL, NULL, 0); // one page
		if (fill[n]) {
			n++;
			continue;
		}
		if (errno == 0 && n > 0) { // found
			p_ibv_destroy_cq(fill[--n]);
			for (int k = 64; k <= 4096 && !guard; k *= 2) { // smallest of two pages, whatever a page is
				struct vb_cq *cq = p_ibv_create_cq(ctx, k, NULL, NULL, 0);
				if (!cq) break;
				struct vb_cq *next = p_ibv_create_cq(ctx, 1, NULL, NULL, 0);
				if (next) { // it got the offset behind: the guard covers the bad one
					p_ibv_destroy_cq(next);
					guard = cq;
				} else {
					p_ibv_destroy_cq(cq);
				}
			}
		}
		break;
	}
	while (n > 0) p_ibv_destroy_cq(fill[--n]);
	return guard;
}

// --- Memory

int vb_alloc_pd(struct vb_context *ctx, void **pd) {
	errno = 0;
	return (*pd = p_ibv_alloc_pd(ctx)) ? 0 : failed();
}

int vb_dealloc_pd(void *pd) { return result(p_ibv_dealloc_pd(pd)); }

int vb_reg_mr(void *pd, uintptr_t addr, size_t len, int access, struct vb_mr **mr) {
	errno = 0;
	return (*mr = p_ibv_reg_mr(pd, (void *)addr, len, access)) ? 0 : failed();
}

void vb_copy(uintptr_t dst, uintptr_t src, size_t n) { memcpy((void *)dst, (const void *)src, n); }

int vb_dereg_mr(struct vb_mr *mr) { return result(p_ibv_dereg_mr(mr)); }

int vb_alloc_mw(struct vb_context *ctx, void *pd, struct vb_mw **mw) {
	if (!ctx->ops.alloc_mw) return EOPNOTSUPP;
	errno = 0;
	return (*mw = ctx->ops.alloc_mw(pd, VB_MW_TYPE_2)) ? 0 : failed();
}

int vb_dealloc_mw(struct vb_mw *mw) { return result(mw->context->ops.dealloc_mw(mw)); }

// --- Completion queues

int vb_create_cq(struct vb_context *ctx, int depth, int vector, struct vb_cq **cq) {
	errno = 0;
	struct vb_channel *ch = p_ibv_create_comp_channel(ctx);
	if (!ch) return failed();
	int err = nonblocking(ch->fd);
	if (!err) {
		int n = ctx->num_comp_vectors > 0 ? ctx->num_comp_vectors : 1;
		errno = 0;
		*cq = p_ibv_create_cq(ctx, depth, NULL, ch, vector % n);
		if (*cq) return 0;
		err = failed();
	}
	p_ibv_destroy_comp_channel(ch);
	return err;
}

// drain takes the channel's events: they tell nothing but that one should poll.
static int drain(struct vb_cq *cq) {
	struct vb_cq *ev;
	void *ctx;
	int n = 0;
	while (p_ibv_get_cq_event(cq->channel, &ev, &ctx) == 0) n++;
	return n;
}

int vb_destroy_cq(struct vb_cq *cq) {
	struct vb_channel *ch = cq->channel;
	int events = drain(cq);
	if (events) p_ibv_ack_cq_events(cq, events);
	int err = result(p_ibv_destroy_cq(cq));
	return err ? err : result(p_ibv_destroy_comp_channel(ch));
}

int vb_poll(struct vb_cq *cq, int n, struct vb_wc *wc) { return cq->context->ops.poll_cq(cq, n, wc); }

// vb_arm asks for an event, unless the one that was asked for (*armed) is still to come: whatever completes, or has
// completed since, brings it. One is asked for at a time, so there is never more than one to take.
int vb_arm(struct vb_cq *cq, int *armed, int n, struct vb_wc *wc) {
	if (*armed) {
		struct vb_cq *ev;
		void *ctx;
		errno = 0;
		if (p_ibv_get_cq_event(cq->channel, &ev, &ctx) == 0) {
			p_ibv_ack_cq_events(cq, 1);
		} else if (errno == EAGAIN) {
			return 0;
		}
	}
	*armed = 0;
	int err = result(cq->context->ops.req_notify_cq(cq, 0));
	if (err) return -err;
	*armed = 1;
	return cq->context->ops.poll_cq(cq, n, wc);
}

// --- Queue pairs

int vb_post_send(struct vb_qp *qp, struct vb_send_wr *first, struct vb_send_wr *last, uintptr_t *bad) {
	struct vb_send_wr *b = NULL;
	uintptr_t next = last->next;
	last->next = 0;
	errno = 0;
	int err = result(qp->context->ops.post_send(qp, first, &b));
	last->next = next;
	*bad = (uintptr_t)(b ? b : first);
	return err;
}

int vb_post_recv(struct vb_qp *qp, struct vb_recv_wr *first, struct vb_recv_wr *last, uintptr_t *bad) {
	struct vb_recv_wr *b = NULL;
	uintptr_t next = last->next;
	last->next = 0;
	errno = 0;
	int err = result(qp->context->ops.post_recv(qp, first, &b));
	last->next = next;
	*bad = (uintptr_t)(b ? b : first);
	return err;
}

int vb_qp_error(struct vb_qp *qp) {
	struct vb_qp_attr a = {.qp_state = VB_QPS_ERR};
	return result(p_ibv_modify_qp(qp, &a, VB_QP_STATE));
}

int vb_qp_destroy(struct vb_qp *qp) { return result(p_ibv_destroy_qp(qp)); }

int vb_qp_rnr_timer(struct vb_qp *qp, int code) {
	struct vb_qp_attr a = {.min_rnr_timer = code};
	return result(p_ibv_modify_qp(qp, &a, VB_QP_MIN_RNR_TIMER));
}

int vb_qp_state(struct vb_qp *qp) {
	struct vb_qp_attr a = {0};
	struct vb_qp_init_attr i = {0};
	int err = result(p_ibv_query_qp(qp, &a, VB_QP_STATE, &i));
	return err ? -err : a.qp_state;
}

// --- Connection manager

int vb_cm_channel(struct vb_cm_channel **ch) {
	errno = 0;
	*ch = p_rdma_create_event_channel();
	return *ch ? nonblocking((*ch)->fd) : failed();
}

enum { CONNECT_REQUEST = 4, CONNECT_RESPONSE = 5, REJECTED = 8, ESTABLISHED = 9 };

// vb_cm_next fetches, copies and acknowledges one event, so that none is ever left unacknowledged.
int vb_cm_next(struct vb_cm_channel *ch, uint64_t token, struct vb_event *out) {
	struct vb_cm_event *e = NULL;
	errno = 0;
	if (p_rdma_get_cm_event(ch, &e)) return failed();
	memset(out, 0, offsetof(struct vb_event, private_data));
	out->event = e->event;
	out->status = e->status;
	if (e->event == CONNECT_REQUEST) {
		out->listen_token = e->listen_id ? (uintptr_t)e->listen_id->context : 0;
		out->id = (uintptr_t)e->id;
		e->id->context = (void *)(uintptr_t)token;
	}
	out->token = (uintptr_t)e->id->context;
	if (e->event == CONNECT_REQUEST || e->event == CONNECT_RESPONSE || e->event == REJECTED || e->event == ESTABLISHED) {
		out->responder_resources = e->conn.responder_resources;
		out->initiator_depth = e->conn.initiator_depth;
		if (e->conn.private_data) {
			out->private_len = e->conn.private_data_len;
			memcpy(out->private_data, e->conn.private_data, out->private_len);
		}
	}
	p_rdma_ack_cm_event(e);
	return 0;
}

int vb_cm_create(struct vb_cm_channel *ch, uint64_t token, struct vb_cm_id **id) {
	errno = 0;
	return result(p_rdma_create_id(ch, id, (void *)(uintptr_t)token, VB_PS_TCP));
}

// vb_cm_ack_timeout sets the time after which a request is sent again: 4.096 us times 2 to the code. Old kernels cannot.
void vb_cm_ack_timeout(struct vb_cm_id *id, int code) {
	uint8_t v = code;
	p_rdma_set_option(id, 0, 3, &v, sizeof v);
}

int vb_cm_destroy(struct vb_cm_id *id) { errno = 0; return result(p_rdma_destroy_id(id)); }
int vb_cm_bind(struct vb_cm_id *id, void *addr) { errno = 0; return result(p_rdma_bind_addr(id, addr)); }
int vb_cm_resolve(struct vb_cm_id *id, void *src, void *dst, int ms) { errno = 0; return result(p_rdma_resolve_addr(id, src, dst, ms)); }
int vb_cm_route(struct vb_cm_id *id, int ms) { errno = 0; return result(p_rdma_resolve_route(id, ms)); }
int vb_cm_listen(struct vb_cm_id *id, int backlog) { errno = 0; return result(p_rdma_listen(id, backlog)); }

int vb_cm_create_qp(struct vb_cm_id *id, void *pd, struct vb_cq *scq, struct vb_cq *rcq, struct vb_qp_cap *cap) {
	struct vb_qp_init_attr a = {.send_cq = scq, .recv_cq = rcq, .cap = *cap, .qp_type = VB_QPT_RC};
	errno = 0;
	int err = result(p_rdma_create_qp(id, pd, &a));
	*cap = a.cap;
	return err;
}

struct vb_qp *vb_cm_take_qp(struct vb_cm_id *id) {
	struct vb_qp *qp = id->qp;
	id->qp = NULL;
	return qp;
}

void vb_cm_comm_est(struct vb_cm_id *id) { p_rdma_notify(id, 4); }

int vb_cm_sync(struct vb_context **open, int max) {
	int n = 0;
	struct vb_context **l = p_rdma_get_devices(&n);
	if (!l) return 0;
	if (n > max) n = max;
	memcpy(open, l, n * sizeof *open);
	p_rdma_free_devices(l);
	return n;
}

int vb_cm_connect(struct vb_cm_id *id, void *data, int len, int rr, int depth, int retry, int rnr) {
	struct vb_conn_param p = {.private_data = data, .private_data_len = len, .responder_resources = rr, .initiator_depth = depth,
		.retry_count = retry, .rnr_retry_count = rnr};
	errno = 0;
	return result(p_rdma_connect(id, &p));
}

int vb_cm_accept(struct vb_cm_id *id, void *data, int len, int rr, int depth, int rnr) {
	struct vb_conn_param p = {.private_data = data, .private_data_len = len, .responder_resources = rr, .initiator_depth = depth,
		.rnr_retry_count = rnr};
	errno = 0;
	return result(p_rdma_accept(id, &p));
}

int vb_cm_reject(struct vb_cm_id *id, void *data, int len) { errno = 0; return result(p_rdma_reject(id, data, len)); }
int vb_cm_disconnect(struct vb_cm_id *id) { errno = 0; return result(p_rdma_disconnect(id)); }
