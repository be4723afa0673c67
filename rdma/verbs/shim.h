// The calls that Go makes; see shim.c. All return 0 or a positive error number unless they say otherwise.
#ifndef RDBLK_VERBS_SHIM_H
#define RDBLK_VERBS_SHIM_H

#include "abi.h"

struct vb_event { // a connection manager event, copied and acknowledged
	int event;
	int status;
	uint64_t token;        // of the id
	uint64_t listen_token; // connect request: of the listener
	uintptr_t id;          // connect request: the new id
	uint8_t responder_resources, initiator_depth, private_len;
	uint8_t private_data[256];
};

const char *vb_load(void); // NULL or what is missing

int vb_device_open(int i, char *name, struct vb_context **ctx); // ENODEV past the end
void vb_device_close(struct vb_context *ctx);
int vb_query(struct vb_context *ctx, struct vb_device_attr *attr);
int vb_probe_inline(struct vb_context *ctx); // bytes
int vb_async_next(struct vb_context *ctx, struct vb_async_event *ev); // EAGAIN: none; acknowledge it with vb_async_ack
void vb_async_ack(struct vb_async_event *ev);
int vb_let_go(struct vb_context *ctx, struct vb_cq *guard); // closes the kernel's files of a device that was removed
int vb_gone(struct vb_context *ctx);   // whether vb_let_go was called
struct vb_cq *vb_guard(struct vb_context *ctx); // see shim.c; NULL: not needed

int vb_alloc_pd(struct vb_context *ctx, void **pd);
int vb_dealloc_pd(void *pd);
int vb_reg_mr(void *pd, uintptr_t addr, size_t len, int access, struct vb_mr **mr);
int vb_dereg_mr(struct vb_mr *mr);
void vb_copy(uintptr_t dst, uintptr_t src, size_t n);
int vb_alloc_mw(struct vb_context *ctx, void *pd, struct vb_mw **mw);
int vb_dealloc_mw(struct vb_mw *mw);

int vb_create_cq(struct vb_context *ctx, int depth, int vector, struct vb_cq **cq);
int vb_destroy_cq(struct vb_cq *cq);
int vb_poll(struct vb_cq *cq, int n, struct vb_wc *wc); // count, or < 0
int vb_arm(struct vb_cq *cq, int *armed, int n, struct vb_wc *wc); // count polled after arming, or < 0

int vb_post_send(struct vb_qp *qp, struct vb_send_wr *first, struct vb_send_wr *last, uintptr_t *bad);
int vb_post_recv(struct vb_qp *qp, struct vb_recv_wr *first, struct vb_recv_wr *last, uintptr_t *bad);
int vb_qp_error(struct vb_qp *qp);
int vb_qp_destroy(struct vb_qp *qp); // may wait for the connection manager
int vb_qp_rnr_timer(struct vb_qp *qp, int code);
int vb_qp_state(struct vb_qp *qp); // state or < 0

int vb_cm_channel(struct vb_cm_channel **ch);
int vb_cm_next(struct vb_cm_channel *ch, uint64_t token, struct vb_event *out); // EAGAIN: none
int vb_cm_create(struct vb_cm_channel *ch, uint64_t token, struct vb_cm_id **id);
void vb_cm_ack_timeout(struct vb_cm_id *id, int code);
int vb_cm_destroy(struct vb_cm_id *id);
int vb_cm_bind(struct vb_cm_id *id, void *addr);
int vb_cm_resolve(struct vb_cm_id *id, void *src, void *dst, int ms);
int vb_cm_route(struct vb_cm_id *id, int ms);
int vb_cm_listen(struct vb_cm_id *id, int backlog);
int vb_cm_create_qp(struct vb_cm_id *id, void *pd, struct vb_cq *scq, struct vb_cq *rcq, struct vb_qp_cap *cap);
struct vb_qp *vb_cm_take_qp(struct vb_cm_id *id); // the id's queue pair, which is not the id's any more
void vb_cm_comm_est(struct vb_cm_id *id);
int vb_cm_sync(struct vb_context **open, int max); // librdmacm looks for devices that came and went; how many are open now
int vb_cm_connect(struct vb_cm_id *id, void *data, int len, int rr, int depth, int retry, int rnr);
int vb_cm_accept(struct vb_cm_id *id, void *data, int len, int rr, int depth, int rnr);
int vb_cm_reject(struct vb_cm_id *id, void *data, int len);
int vb_cm_disconnect(struct vb_cm_id *id);

#endif
