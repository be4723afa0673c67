// Compares ../abi.h with the headers of rdma-core. Compiled, never run, by TestABI.
#include <infiniband/verbs.h>
#include <rdma/rdma_cma.h>

#include "../abi.h"

#define SIZE(ours, theirs) _Static_assert(sizeof(struct ours) == sizeof(struct theirs), "size of " #ours)
#define ROOM(ours, theirs) _Static_assert(sizeof(struct ours) >= sizeof(struct theirs), "size of " #ours)
#define AT(ours, f, theirs, g) \
	_Static_assert(offsetof(struct ours, f) == offsetof(struct theirs, g), "offset of " #ours "." #f); \
	_Static_assert(sizeof(((struct ours *)0)->f) == sizeof(((struct theirs *)0)->g), "size of " #ours "." #f)
#define SAME(ours, theirs, f) AT(ours, f, theirs, f)
#define VALUE(ours, theirs) _Static_assert((int)(ours) == (int)(theirs), #theirs)

SIZE(vb_sge, ibv_sge);
SAME(vb_sge, ibv_sge, addr); SAME(vb_sge, ibv_sge, length); SAME(vb_sge, ibv_sge, lkey);

SIZE(vb_send_wr, ibv_send_wr);
SAME(vb_send_wr, ibv_send_wr, wr_id); SAME(vb_send_wr, ibv_send_wr, next); SAME(vb_send_wr, ibv_send_wr, sg_list);
SAME(vb_send_wr, ibv_send_wr, num_sge); SAME(vb_send_wr, ibv_send_wr, opcode); SAME(vb_send_wr, ibv_send_wr, send_flags);
SAME(vb_send_wr, ibv_send_wr, invalidate_rkey);
AT(vb_send_wr, remote_addr, ibv_send_wr, wr.rdma.remote_addr); AT(vb_send_wr, rkey, ibv_send_wr, wr.rdma.rkey);
AT(vb_send_wr, mw, ibv_send_wr, bind_mw.mw); AT(vb_send_wr, mw_rkey, ibv_send_wr, bind_mw.rkey);
AT(vb_send_wr, mr, ibv_send_wr, bind_mw.bind_info.mr); AT(vb_send_wr, mw_addr, ibv_send_wr, bind_mw.bind_info.addr);
AT(vb_send_wr, mw_length, ibv_send_wr, bind_mw.bind_info.length);
AT(vb_send_wr, mw_access, ibv_send_wr, bind_mw.bind_info.mw_access_flags);

SIZE(vb_recv_wr, ibv_recv_wr);
SAME(vb_recv_wr, ibv_recv_wr, wr_id); SAME(vb_recv_wr, ibv_recv_wr, next); SAME(vb_recv_wr, ibv_recv_wr, sg_list);
SAME(vb_recv_wr, ibv_recv_wr, num_sge);

SIZE(vb_wc, ibv_wc);
SAME(vb_wc, ibv_wc, wr_id); SAME(vb_wc, ibv_wc, status); SAME(vb_wc, ibv_wc, opcode); SAME(vb_wc, ibv_wc, byte_len);
SAME(vb_wc, ibv_wc, invalidated_rkey); SAME(vb_wc, ibv_wc, qp_num); SAME(vb_wc, ibv_wc, wc_flags); SAME(vb_wc, ibv_wc, dlid_path_bits);

SAME(vb_device, ibv_device, node_type); SAME(vb_device, ibv_device, transport_type); SAME(vb_device, ibv_device, name);
SAME(vb_device, ibv_device, dev_name);

SAME(vb_context, ibv_context, device); SAME(vb_context, ibv_context, ops); SAME(vb_context, ibv_context, cmd_fd);
SAME(vb_context, ibv_context, async_fd); SAME(vb_context, ibv_context, num_comp_vectors);
#define OP(f) AT(vb_context, ops.f, ibv_context, ops.f)
OP(alloc_mw); OP(dealloc_mw); OP(poll_cq); OP(req_notify_cq); OP(post_srq_recv); OP(post_send); OP(post_recv);

SAME(vb_channel, ibv_comp_channel, fd);
SAME(vb_cq, ibv_cq, context); SAME(vb_cq, ibv_cq, channel); SAME(vb_cq, ibv_cq, cqe);
SAME(vb_qp, ibv_qp, context); SAME(vb_qp, ibv_qp, send_cq); SAME(vb_qp, ibv_qp, qp_num);
SIZE(vb_mr, ibv_mr); SAME(vb_mr, ibv_mr, lkey); SAME(vb_mr, ibv_mr, rkey);
SAME(vb_mw, ibv_mw, context); SAME(vb_mw, ibv_mw, rkey);

SIZE(vb_qp_cap, ibv_qp_cap); SAME(vb_qp_cap, ibv_qp_cap, max_send_wr); SAME(vb_qp_cap, ibv_qp_cap, max_recv_wr);
SAME(vb_qp_cap, ibv_qp_cap, max_send_sge); SAME(vb_qp_cap, ibv_qp_cap, max_recv_sge); SAME(vb_qp_cap, ibv_qp_cap, max_inline_data);
SIZE(vb_qp_init_attr, ibv_qp_init_attr); SAME(vb_qp_init_attr, ibv_qp_init_attr, cap); SAME(vb_qp_init_attr, ibv_qp_init_attr, qp_type);
SIZE(vb_qp_attr, ibv_qp_attr); SAME(vb_qp_attr, ibv_qp_attr, qp_state); SAME(vb_qp_attr, ibv_qp_attr, min_rnr_timer);

ROOM(vb_device_attr, ibv_device_attr);
#define DEV(f) SAME(vb_device_attr, ibv_device_attr, f)
DEV(max_mr_size); DEV(vendor_id); DEV(max_qp_wr); DEV(device_cap_flags); DEV(max_sge); DEV(max_sge_rd); DEV(max_cqe);
DEV(max_qp_rd_atom); DEV(max_qp_init_rd_atom);

SIZE(vb_async_event, ibv_async_event); SAME(vb_async_event, ibv_async_event, event_type);
AT(vb_async_event, element, ibv_async_event, element.qp);

SIZE(vb_cm_channel, rdma_event_channel);
SIZE(vb_conn_param, rdma_conn_param);
#define PARAM(f) SAME(vb_conn_param, rdma_conn_param, f)
PARAM(private_data); PARAM(private_data_len); PARAM(responder_resources); PARAM(initiator_depth); PARAM(retry_count); PARAM(rnr_retry_count);
SAME(vb_cm_id, rdma_cm_id, verbs); SAME(vb_cm_id, rdma_cm_id, context); SAME(vb_cm_id, rdma_cm_id, qp);
AT(vb_cm_id, src_addr, rdma_cm_id, route.addr.src_storage); AT(vb_cm_id, dst_addr, rdma_cm_id, route.addr.dst_storage);
SAME(vb_cm_event, rdma_cm_event, id); SAME(vb_cm_event, rdma_cm_event, listen_id); SAME(vb_cm_event, rdma_cm_event, event);
SAME(vb_cm_event, rdma_cm_event, status); AT(vb_cm_event, conn, rdma_cm_event, param.conn);

VALUE(VB_QPT_RC, IBV_QPT_RC); VALUE(VB_QPS_RTS, IBV_QPS_RTS); VALUE(VB_QPS_ERR, IBV_QPS_ERR); VALUE(VB_QP_STATE, IBV_QP_STATE);
VALUE(VB_QP_MIN_RNR_TIMER, IBV_QP_MIN_RNR_TIMER); VALUE(VB_PS_TCP, RDMA_PS_TCP);
VALUE(VB_CAP_MEM_WINDOW_2B, IBV_DEVICE_MEM_WINDOW_TYPE_2B); VALUE(VB_CAP_MGT_EXTENSIONS, IBV_DEVICE_MEM_MGT_EXTENSIONS);
VALUE(VB_MW_TYPE_2, IBV_MW_TYPE_2);

// Numbers that the Go files use.
VALUE(0, IBV_WR_RDMA_WRITE); VALUE(2, IBV_WR_SEND); VALUE(4, IBV_WR_RDMA_READ); VALUE(7, IBV_WR_LOCAL_INV); VALUE(8, IBV_WR_BIND_MW);
VALUE(9, IBV_WR_SEND_WITH_INV);
VALUE(1, IBV_SEND_FENCE); VALUE(2, IBV_SEND_SIGNALED); VALUE(4, IBV_SEND_SOLICITED); VALUE(8, IBV_SEND_INLINE);
VALUE(1, IBV_ACCESS_LOCAL_WRITE); VALUE(2, IBV_ACCESS_REMOTE_WRITE); VALUE(4, IBV_ACCESS_REMOTE_READ); VALUE(16, IBV_ACCESS_MW_BIND);
VALUE(8, IBV_WC_WITH_INV); VALUE(1, IBV_WC_LOC_LEN_ERR); VALUE(5, IBV_WC_WR_FLUSH_ERR); VALUE(6, IBV_WC_MW_BIND_ERR);
VALUE(9, IBV_WC_REM_INV_REQ_ERR); VALUE(10, IBV_WC_REM_ACCESS_ERR); VALUE(13, IBV_WC_RNR_RETRY_EXC_ERR); VALUE(20, IBV_WC_RESP_TIMEOUT_ERR);
VALUE(1, IBV_EVENT_QP_FATAL); VALUE(2, IBV_EVENT_QP_REQ_ERR); VALUE(3, IBV_EVENT_QP_ACCESS_ERR); VALUE(8, IBV_EVENT_DEVICE_FATAL);
VALUE(1, IBV_TRANSPORT_IWARP); VALUE(0, RDMA_CM_EVENT_ADDR_RESOLVED); VALUE(2, RDMA_CM_EVENT_ROUTE_RESOLVED);
VALUE(4, RDMA_CM_EVENT_CONNECT_REQUEST); VALUE(8, RDMA_CM_EVENT_REJECTED); VALUE(9, RDMA_CM_EVENT_ESTABLISHED);
VALUE(10, RDMA_CM_EVENT_DISCONNECTED); VALUE(11, RDMA_CM_EVENT_DEVICE_REMOVAL);
VALUE(0, RDMA_OPTION_ID); VALUE(3, RDMA_OPTION_ID_ACK_TIMEOUT);
