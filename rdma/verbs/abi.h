// The part of the user ABI of libibverbs and librdmacm that this package uses, declared here from
// the facts of that ABI, so that a build needs no rdma-core headers. The libraries keep these
// layouts within their sonames (libibverbs.so.1, librdmacm.so.1). TestABI compares each offset
// and constant with the real headers where those are installed.
#ifndef RDBLK_VERBS_ABI_H
#define RDBLK_VERBS_ABI_H

#include <stdint.h>
#include <stddef.h>

// Pointers inside work requests are kept as uintptr_t: Go fills these structures, which lie in C memory.

struct vb_sge { // ibv_sge
	uint64_t addr;
	uint32_t length;
	uint32_t lkey;
};

struct vb_send_wr { // ibv_send_wr, its unions flattened
	uint64_t wr_id;
	uintptr_t next;
	uintptr_t sg_list;
	int32_t num_sge;
	int32_t opcode;
	uint32_t send_flags;
	uint32_t invalidate_rkey;
	uint64_t remote_addr; // wr.rdma
	uint32_t rkey;
	uint32_t pad0;
	uint64_t pad1[3];
	uintptr_t mw; // bind_mw
	uint32_t mw_rkey;
	uint32_t pad2;
	uintptr_t mr;
	uint64_t mw_addr;
	uint64_t mw_length;
	uint32_t mw_access;
	uint32_t pad3;
};

struct vb_recv_wr { // ibv_recv_wr
	uint64_t wr_id;
	uintptr_t next;
	uintptr_t sg_list;
	int32_t num_sge;
	int32_t pad;
};

struct vb_wc { // ibv_wc
	uint64_t wr_id;
	int32_t status;
	int32_t opcode;
	uint32_t vendor_err;
	uint32_t byte_len;
	uint32_t invalidated_rkey;
	uint32_t qp_num;
	uint32_t src_qp;
	uint32_t wc_flags;
	uint16_t pkey_index;
	uint16_t slid;
	uint8_t sl;
	uint8_t dlid_path_bits;
};

struct vb_device { // ibv_device, its beginning
	void *ops[2];
	int32_t node_type;
	int32_t transport_type; // 0 InfiniBand and RoCE, 1 iWARP
	char name[64];
	char dev_name[64]; // of the character device, "uverbs0"
};

struct vb_cq;
struct vb_qp;
struct vb_mw;
struct vb_pd;

struct vb_context { // ibv_context, its beginning
	struct vb_device *device;
	struct { // ibv_context_ops
		void *compat0[7];
		struct vb_mw *(*alloc_mw)(struct vb_pd *, int type);
		void *bind_mw;
		int (*dealloc_mw)(struct vb_mw *);
		void *compat1;
		int (*poll_cq)(struct vb_cq *, int, struct vb_wc *);
		int (*req_notify_cq)(struct vb_cq *, int solicited_only);
		void *compat2[7];
		void *post_srq_recv;
		void *compat3[4];
		int (*post_send)(struct vb_qp *, struct vb_send_wr *, struct vb_send_wr **bad);
		int (*post_recv)(struct vb_qp *, struct vb_recv_wr *, struct vb_recv_wr **bad);
		void *compat4[5];
	} ops;
	int cmd_fd;
	int async_fd;
	int num_comp_vectors;
};

struct vb_channel { // ibv_comp_channel, its beginning
	struct vb_context *context;
	int fd;
};

struct vb_cq { // ibv_cq, its beginning
	struct vb_context *context;
	struct vb_channel *channel;
	void *cq_context;
	uint32_t handle;
	int cqe;
};

struct vb_qp { // ibv_qp, its beginning
	struct vb_context *context;
	void *qp_context;
	void *pd, *send_cq, *recv_cq, *srq;
	uint32_t handle;
	uint32_t qp_num;
};

struct vb_mr { // ibv_mr
	struct vb_context *context;
	void *pd;
	void *addr;
	size_t length;
	uint32_t handle;
	uint32_t lkey;
	uint32_t rkey;
};

struct vb_mw { // ibv_mw, its beginning
	struct vb_context *context;
	void *pd;
	uint32_t rkey;
};

struct vb_qp_cap { // ibv_qp_cap
	uint32_t max_send_wr, max_recv_wr, max_send_sge, max_recv_sge, max_inline_data;
};

struct vb_qp_init_attr { // ibv_qp_init_attr
	void *qp_context;
	void *send_cq, *recv_cq, *srq;
	struct vb_qp_cap cap;
	int qp_type;
	int sq_sig_all;
};

struct vb_qp_attr { // ibv_qp_attr
	int qp_state;
	char pad0[124];
	uint8_t min_rnr_timer;
	char pad1[15];
};

struct vb_device_attr { // ibv_device_attr
	char fw_ver[64];
	uint64_t node_guid, sys_image_guid, max_mr_size, page_size_cap;
	uint32_t vendor_id, vendor_part_id, hw_ver;
	int max_qp, max_qp_wr;
	uint32_t device_cap_flags;
	int max_sge, max_sge_rd, max_cq, max_cqe, max_mr, max_pd, max_qp_rd_atom, max_ee_rd_atom, max_res_rd_atom, max_qp_init_rd_atom;
	int rest[19];
	char pad[64]; // room, should a library write more
};

struct vb_async_event { // ibv_async_event
	void *element;
	int event_type;
};

struct vb_cm_channel { // rdma_event_channel
	int fd;
};

struct vb_conn_param { // rdma_conn_param
	const void *private_data;
	uint8_t private_data_len;
	uint8_t responder_resources;
	uint8_t initiator_depth;
	uint8_t flow_control;
	uint8_t retry_count;
	uint8_t rnr_retry_count;
	uint8_t srq;
	uint32_t qp_num;
};

struct vb_cm_id { // rdma_cm_id, its beginning
	struct vb_context *verbs;
	struct vb_cm_channel *channel;
	void *context;
	struct vb_qp *qp;
	char src_addr[128]; // sockaddr_storage
	char dst_addr[128];
};

struct vb_cm_event { // rdma_cm_event, its beginning
	struct vb_cm_id *id;
	struct vb_cm_id *listen_id;
	int event;
	int status;
	struct vb_conn_param conn;
};

enum {
	VB_QPT_RC = 2,
	VB_QPS_RTS = 3,
	VB_QPS_ERR = 6,
	VB_QP_STATE = 1 << 0,
	VB_QP_MIN_RNR_TIMER = 1 << 15,
	VB_PS_TCP = 0x0106,
	VB_CAP_MEM_WINDOW_2B = 1 << 24,
	VB_CAP_MGT_EXTENSIONS = 1 << 21,
	VB_MW_TYPE_2 = 2,
};

#endif
