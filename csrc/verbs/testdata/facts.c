/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Prints what abi.h claims, or with -DREAL what libibverbs' own headers say: sizes,
 * offsets and values, a line each. With -DREAL it does not compile unless every
 * prototype in calls.h is libibverbs'.
 */
#ifdef REAL
#include <infiniband/verbs.h>
#undef ibv_query_port /* the function, which has another struct */
#else
#include "abi.h"
#endif
#include "calls.h"

#include <stdio.h>

#ifdef REAL
#define SAME(version, ret, name, args)                                                             \
	_Static_assert(__builtin_types_compatible_p(__typeof__(&name), ret(*) args),               \
		       #name " has another prototype");
SL_VERBS_CALLS(SAME)
SL_VERBS_OPTIONAL_CALLS(SAME)
#endif

#define VALUE(v) printf("%s = %lld\n", #v, (long long)(v));
#define SIZE(t) printf("sizeof %s = %zu\n", #t, sizeof(t));
#define FIELD(t, f)                                                                                \
	printf("%s.%s at %zu, %zu bytes\n", #t, #f, offsetof(t, f), sizeof(((t *)0)->f));

static void values_1(void)
{
	VALUE(IBV_WC_SUCCESS) VALUE(IBV_WC_LOC_LEN_ERR) VALUE(IBV_WC_LOC_PROT_ERR)
	VALUE(IBV_WC_WR_FLUSH_ERR) VALUE(IBV_WC_BAD_RESP_ERR) VALUE(IBV_WC_REM_INV_REQ_ERR)
	VALUE(IBV_WC_REM_ACCESS_ERR) VALUE(IBV_WC_REM_OP_ERR) VALUE(IBV_WC_RETRY_EXC_ERR)
	VALUE(IBV_WC_RNR_RETRY_EXC_ERR) VALUE(IBV_WC_FATAL_ERR) VALUE(IBV_WC_RESP_TIMEOUT_ERR)
	VALUE(IBV_WC_GENERAL_ERR) VALUE(IBV_WC_SEND) VALUE(IBV_WC_RDMA_WRITE)
	VALUE(IBV_WC_RDMA_READ) VALUE(IBV_WC_RECV) VALUE(IBV_WC_RECV_RDMA_WITH_IMM)
	VALUE(IBV_WC_WITH_IMM) VALUE(IBV_ACCESS_LOCAL_WRITE) VALUE(IBV_ACCESS_REMOTE_WRITE)
	VALUE(IBV_ACCESS_REMOTE_READ) VALUE(IBV_ACCESS_RELAXED_ORDERING) VALUE(IBV_MW_TYPE_1)
	VALUE(IBV_QPT_RC) VALUE(IBV_QP_STATE) VALUE(IBV_QP_ACCESS_FLAGS) VALUE(IBV_QP_PKEY_INDEX)
	VALUE(IBV_QP_PORT) VALUE(IBV_QP_AV) VALUE(IBV_QP_PATH_MTU) VALUE(IBV_QP_TIMEOUT)
	VALUE(IBV_QP_RETRY_CNT) VALUE(IBV_QP_RNR_RETRY) VALUE(IBV_QP_RQ_PSN)
	VALUE(IBV_QP_MAX_QP_RD_ATOMIC) VALUE(IBV_QP_MIN_RNR_TIMER) VALUE(IBV_QP_SQ_PSN)
	VALUE(IBV_QP_MAX_DEST_RD_ATOMIC) VALUE(IBV_QP_DEST_QPN) VALUE(IBV_QPS_RESET)
	VALUE(IBV_QPS_INIT) VALUE(IBV_QPS_RTR) VALUE(IBV_QPS_RTS) VALUE(IBV_QPS_ERR)
	VALUE(IBV_MIG_MIGRATED) VALUE(IBV_WR_RDMA_WRITE) VALUE(IBV_WR_RDMA_WRITE_WITH_IMM)
	VALUE(IBV_WR_SEND) VALUE(IBV_WR_SEND_WITH_IMM) VALUE(IBV_WR_RDMA_READ)
	VALUE(IBV_SEND_SIGNALED) VALUE(IBV_SEND_INLINE) VALUE(IBV_NODE_CA) VALUE(IBV_TRANSPORT_IB)
	VALUE(IBV_SYSFS_NAME_MAX) VALUE(IBV_SYSFS_PATH_MAX)
	VALUE(IBV_ATOMIC_NONE) VALUE(IBV_MTU_256)
	VALUE(IBV_MTU_1024) VALUE(IBV_MTU_4096) VALUE(IBV_PORT_DOWN) VALUE(IBV_PORT_ACTIVE)
	VALUE(IBV_LINK_LAYER_ETHERNET) VALUE(IBV_EVENT_CQ_ERR) VALUE(IBV_EVENT_QP_FATAL)
}

static void values_2(void)
{
	VALUE(IBV_EVENT_QP_REQ_ERR) VALUE(IBV_EVENT_QP_ACCESS_ERR) VALUE(IBV_EVENT_DEVICE_FATAL)
	VALUE(IBV_EVENT_PORT_ACTIVE) VALUE(IBV_EVENT_PORT_ERR) VALUE(IBV_EVENT_SRQ_ERR)
	VALUE(IBV_EVENT_QP_LAST_WQE_REACHED)
}

static void sizes(void)
{
	SIZE(enum ibv_wc_status) SIZE(enum ibv_wc_opcode) SIZE(enum ibv_mw_type)
	SIZE(enum ibv_qp_type)
	SIZE(enum ibv_qp_state) SIZE(enum ibv_mig_state) SIZE(enum ibv_wr_opcode)
	SIZE(enum ibv_node_type)
	SIZE(enum ibv_transport_type) SIZE(enum ibv_atomic_cap) SIZE(enum ibv_mtu)
	SIZE(enum ibv_port_state)
	SIZE(enum ibv_event_type) SIZE(struct ibv_wc) SIZE(struct ibv_pd) SIZE(struct ibv_mr)
	SIZE(struct ibv_global_route) SIZE(struct ibv_ah_attr) SIZE(struct ibv_srq_attr)
	SIZE(struct ibv_srq_init_attr) SIZE(struct ibv_qp_cap) SIZE(struct ibv_qp_init_attr)
	SIZE(struct ibv_qp_attr) SIZE(struct ibv_sge) SIZE(struct ibv_mw_bind_info)
	SIZE(struct ibv_send_wr)
	SIZE(struct ibv_recv_wr) SIZE(struct ibv_srq) SIZE(struct ibv_qp)
	SIZE(struct ibv_comp_channel)
	SIZE(struct ibv_cq) SIZE(struct ibv_context_ops) SIZE(struct ibv_context)
	SIZE(union ibv_gid)
	SIZE(struct _ibv_device_ops) SIZE(struct ibv_device) SIZE(struct ibv_device_attr)
	SIZE(struct ibv_port_attr) SIZE(struct ibv_async_event)
}

static void fields_1(void)
{
	FIELD(struct ibv_wc, wr_id) FIELD(struct ibv_wc, status) FIELD(struct ibv_wc, opcode)
	FIELD(struct ibv_wc, vendor_err) FIELD(struct ibv_wc, byte_len)
	FIELD(struct ibv_wc, imm_data)
	FIELD(struct ibv_wc, invalidated_rkey) FIELD(struct ibv_wc, qp_num)
	FIELD(struct ibv_wc, src_qp)
	FIELD(struct ibv_wc, wc_flags) FIELD(struct ibv_wc, pkey_index) FIELD(struct ibv_wc, slid)
	FIELD(struct ibv_wc, sl) FIELD(struct ibv_wc, dlid_path_bits) FIELD(struct ibv_pd, context)
	FIELD(struct ibv_pd, handle) FIELD(struct ibv_mr, context) FIELD(struct ibv_mr, pd)
	FIELD(struct ibv_mr, addr) FIELD(struct ibv_mr, length) FIELD(struct ibv_mr, handle)
	FIELD(struct ibv_mr, lkey) FIELD(struct ibv_mr, rkey) FIELD(struct ibv_global_route, dgid)
	FIELD(struct ibv_global_route, flow_label) FIELD(struct ibv_global_route, sgid_index)
	FIELD(struct ibv_global_route, hop_limit) FIELD(struct ibv_global_route, traffic_class)
	FIELD(struct ibv_ah_attr, grh) FIELD(struct ibv_ah_attr, dlid) FIELD(struct ibv_ah_attr, sl)
	FIELD(struct ibv_ah_attr, src_path_bits) FIELD(struct ibv_ah_attr, static_rate)
	FIELD(struct ibv_ah_attr, is_global) FIELD(struct ibv_ah_attr, port_num)
	FIELD(struct ibv_srq_attr, max_wr) FIELD(struct ibv_srq_attr, max_sge)
	FIELD(struct ibv_srq_attr, srq_limit) FIELD(struct ibv_srq_init_attr, srq_context)
	FIELD(struct ibv_srq_init_attr, attr) FIELD(struct ibv_qp_cap, max_send_wr)
	FIELD(struct ibv_qp_cap, max_recv_wr) FIELD(struct ibv_qp_cap, max_send_sge)
	FIELD(struct ibv_qp_cap, max_recv_sge) FIELD(struct ibv_qp_cap, max_inline_data)
	FIELD(struct ibv_qp_init_attr, qp_context) FIELD(struct ibv_qp_init_attr, send_cq)
	FIELD(struct ibv_qp_init_attr, recv_cq) FIELD(struct ibv_qp_init_attr, srq)
	FIELD(struct ibv_qp_init_attr, cap) FIELD(struct ibv_qp_init_attr, qp_type)
	FIELD(struct ibv_qp_init_attr, sq_sig_all) FIELD(struct ibv_qp_attr, qp_state)
	FIELD(struct ibv_qp_attr, cur_qp_state) FIELD(struct ibv_qp_attr, path_mtu)
	FIELD(struct ibv_qp_attr, path_mig_state) FIELD(struct ibv_qp_attr, qkey)
	FIELD(struct ibv_qp_attr, rq_psn) FIELD(struct ibv_qp_attr, sq_psn)
	FIELD(struct ibv_qp_attr, dest_qp_num) FIELD(struct ibv_qp_attr, qp_access_flags)
	FIELD(struct ibv_qp_attr, cap) FIELD(struct ibv_qp_attr, ah_attr)
	FIELD(struct ibv_qp_attr, alt_ah_attr) FIELD(struct ibv_qp_attr, pkey_index)
	FIELD(struct ibv_qp_attr, alt_pkey_index) FIELD(struct ibv_qp_attr, en_sqd_async_notify)
	FIELD(struct ibv_qp_attr, sq_draining) FIELD(struct ibv_qp_attr, max_rd_atomic)
	FIELD(struct ibv_qp_attr, max_dest_rd_atomic) FIELD(struct ibv_qp_attr, min_rnr_timer)
	FIELD(struct ibv_qp_attr, port_num) FIELD(struct ibv_qp_attr, timeout)
	FIELD(struct ibv_qp_attr, retry_cnt) FIELD(struct ibv_qp_attr, rnr_retry)
	FIELD(struct ibv_qp_attr, alt_port_num) FIELD(struct ibv_qp_attr, alt_timeout)
	FIELD(struct ibv_qp_attr, rate_limit) FIELD(struct ibv_sge, addr)
	FIELD(struct ibv_sge, length)
	FIELD(struct ibv_sge, lkey) FIELD(struct ibv_mw_bind_info, mr)
	FIELD(struct ibv_mw_bind_info, addr)
	FIELD(struct ibv_mw_bind_info, length) FIELD(struct ibv_mw_bind_info, mw_access_flags)
}

static void fields_2(void)
{
	FIELD(struct ibv_send_wr, wr_id) FIELD(struct ibv_send_wr, next)
	FIELD(struct ibv_send_wr, sg_list)
	FIELD(struct ibv_send_wr, num_sge) FIELD(struct ibv_send_wr, opcode)
	FIELD(struct ibv_send_wr, send_flags) FIELD(struct ibv_send_wr, imm_data)
	FIELD(struct ibv_send_wr, invalidate_rkey) FIELD(struct ibv_send_wr, wr)
	FIELD(struct ibv_send_wr, wr.rdma) FIELD(struct ibv_send_wr, wr.rdma.remote_addr)
	FIELD(struct ibv_send_wr, wr.rdma.rkey) FIELD(struct ibv_send_wr, wr.atomic)
	FIELD(struct ibv_send_wr, wr.atomic.remote_addr)
	FIELD(struct ibv_send_wr, wr.atomic.compare_add)
	FIELD(struct ibv_send_wr, wr.atomic.swap) FIELD(struct ibv_send_wr, wr.atomic.rkey)
	FIELD(struct ibv_send_wr, qp_type) FIELD(struct ibv_send_wr, qp_type.xrc)
	FIELD(struct ibv_send_wr, qp_type.xrc.remote_srqn) FIELD(struct ibv_send_wr, bind_mw)
	FIELD(struct ibv_send_wr, bind_mw.mw) FIELD(struct ibv_send_wr, bind_mw.rkey)
	FIELD(struct ibv_send_wr, bind_mw.bind_info) FIELD(struct ibv_recv_wr, wr_id)
	FIELD(struct ibv_recv_wr, next) FIELD(struct ibv_recv_wr, sg_list)
	FIELD(struct ibv_recv_wr, num_sge)
	FIELD(struct ibv_srq, context) FIELD(struct ibv_srq, srq_context) FIELD(struct ibv_srq, pd)
	FIELD(struct ibv_srq, handle) FIELD(struct ibv_srq, mutex) FIELD(struct ibv_srq, cond)
	FIELD(struct ibv_srq, events_completed) FIELD(struct ibv_qp, context)
	FIELD(struct ibv_qp, qp_context)
	FIELD(struct ibv_qp, pd) FIELD(struct ibv_qp, send_cq) FIELD(struct ibv_qp, recv_cq)
	FIELD(struct ibv_qp, srq) FIELD(struct ibv_qp, handle) FIELD(struct ibv_qp, qp_num)
	FIELD(struct ibv_qp, state) FIELD(struct ibv_qp, qp_type) FIELD(struct ibv_qp, mutex)
	FIELD(struct ibv_qp, cond) FIELD(struct ibv_qp, events_completed)
	FIELD(struct ibv_comp_channel, context) FIELD(struct ibv_comp_channel, fd)
	FIELD(struct ibv_comp_channel, refcnt) FIELD(struct ibv_cq, context)
	FIELD(struct ibv_cq, channel)
	FIELD(struct ibv_cq, cq_context) FIELD(struct ibv_cq, handle) FIELD(struct ibv_cq, cqe)
	FIELD(struct ibv_cq, mutex) FIELD(struct ibv_cq, cond)
	FIELD(struct ibv_cq, comp_events_completed)
	FIELD(struct ibv_cq, async_events_completed)
	FIELD(struct ibv_context_ops, _compat_query_device)
	FIELD(struct ibv_context_ops, _compat_query_port)
	FIELD(struct ibv_context_ops, _compat_alloc_pd)
	FIELD(struct ibv_context_ops, _compat_dealloc_pd)
	FIELD(struct ibv_context_ops, _compat_reg_mr)
	FIELD(struct ibv_context_ops, _compat_rereg_mr)
	FIELD(struct ibv_context_ops, _compat_dereg_mr)
	FIELD(struct ibv_context_ops, alloc_mw) FIELD(struct ibv_context_ops, bind_mw)
	FIELD(struct ibv_context_ops, dealloc_mw) FIELD(struct ibv_context_ops, _compat_create_cq)
	FIELD(struct ibv_context_ops, poll_cq) FIELD(struct ibv_context_ops, req_notify_cq)
	FIELD(struct ibv_context_ops, _compat_cq_event)
	FIELD(struct ibv_context_ops, _compat_resize_cq)
	FIELD(struct ibv_context_ops, _compat_destroy_cq)
	FIELD(struct ibv_context_ops, _compat_create_srq)
	FIELD(struct ibv_context_ops, _compat_modify_srq)
	FIELD(struct ibv_context_ops, _compat_query_srq)
	FIELD(struct ibv_context_ops, _compat_destroy_srq)
	FIELD(struct ibv_context_ops, post_srq_recv)
	FIELD(struct ibv_context_ops, _compat_create_qp)
	FIELD(struct ibv_context_ops, _compat_query_qp)
	FIELD(struct ibv_context_ops, _compat_modify_qp)
	FIELD(struct ibv_context_ops, _compat_destroy_qp)
	FIELD(struct ibv_context_ops, post_send) FIELD(struct ibv_context_ops, post_recv)
	FIELD(struct ibv_context_ops, _compat_create_ah)
	FIELD(struct ibv_context_ops, _compat_destroy_ah)
	FIELD(struct ibv_context_ops, _compat_attach_mcast)
	FIELD(struct ibv_context_ops, _compat_detach_mcast)
	FIELD(struct ibv_context_ops, _compat_async_event) FIELD(struct ibv_context, device)
	FIELD(struct ibv_context, ops) FIELD(struct ibv_context, cmd_fd)
	FIELD(struct ibv_context, async_fd)
	FIELD(struct ibv_context, num_comp_vectors) FIELD(struct ibv_context, mutex)
	FIELD(struct ibv_context, abi_compat)
}

static void fields_3(void)
{
	FIELD(union ibv_gid, raw) FIELD(union ibv_gid, global)
	FIELD(union ibv_gid, global.subnet_prefix)
	FIELD(union ibv_gid, global.interface_id) FIELD(struct _ibv_device_ops, _dummy1)
	FIELD(struct _ibv_device_ops, _dummy2) FIELD(struct ibv_device, _ops)
	FIELD(struct ibv_device, node_type) FIELD(struct ibv_device, transport_type)
	FIELD(struct ibv_device, name) FIELD(struct ibv_device, dev_name)
	FIELD(struct ibv_device, dev_path)
	FIELD(struct ibv_device, ibdev_path) FIELD(struct ibv_device_attr, fw_ver)
	FIELD(struct ibv_device_attr, node_guid) FIELD(struct ibv_device_attr, sys_image_guid)
	FIELD(struct ibv_device_attr, max_mr_size) FIELD(struct ibv_device_attr, page_size_cap)
	FIELD(struct ibv_device_attr, vendor_id) FIELD(struct ibv_device_attr, vendor_part_id)
	FIELD(struct ibv_device_attr, hw_ver) FIELD(struct ibv_device_attr, max_qp)
	FIELD(struct ibv_device_attr, max_qp_wr) FIELD(struct ibv_device_attr, device_cap_flags)
	FIELD(struct ibv_device_attr, max_sge) FIELD(struct ibv_device_attr, max_sge_rd)
	FIELD(struct ibv_device_attr, max_cq) FIELD(struct ibv_device_attr, max_cqe)
	FIELD(struct ibv_device_attr, max_mr) FIELD(struct ibv_device_attr, max_pd)
	FIELD(struct ibv_device_attr, max_qp_rd_atom) FIELD(struct ibv_device_attr, max_ee_rd_atom)
	FIELD(struct ibv_device_attr, max_res_rd_atom)
	FIELD(struct ibv_device_attr, max_qp_init_rd_atom)
	FIELD(struct ibv_device_attr, max_ee_init_rd_atom) FIELD(struct ibv_device_attr, atomic_cap)
	FIELD(struct ibv_device_attr, max_ee) FIELD(struct ibv_device_attr, max_rdd)
	FIELD(struct ibv_device_attr, max_mw) FIELD(struct ibv_device_attr, max_raw_ipv6_qp)
	FIELD(struct ibv_device_attr, max_raw_ethy_qp) FIELD(struct ibv_device_attr, max_mcast_grp)
	FIELD(struct ibv_device_attr, max_mcast_qp_attach)
	FIELD(struct ibv_device_attr, max_total_mcast_qp_attach)
	FIELD(struct ibv_device_attr, max_ah)
	FIELD(struct ibv_device_attr, max_fmr) FIELD(struct ibv_device_attr, max_map_per_fmr)
	FIELD(struct ibv_device_attr, max_srq) FIELD(struct ibv_device_attr, max_srq_wr)
	FIELD(struct ibv_device_attr, max_srq_sge) FIELD(struct ibv_device_attr, max_pkeys)
	FIELD(struct ibv_device_attr, local_ca_ack_delay)
	FIELD(struct ibv_device_attr, phys_port_cnt)
	FIELD(struct ibv_port_attr, state) FIELD(struct ibv_port_attr, max_mtu)
	FIELD(struct ibv_port_attr, active_mtu) FIELD(struct ibv_port_attr, gid_tbl_len)
	FIELD(struct ibv_port_attr, port_cap_flags) FIELD(struct ibv_port_attr, max_msg_sz)
	FIELD(struct ibv_port_attr, bad_pkey_cntr) FIELD(struct ibv_port_attr, qkey_viol_cntr)
	FIELD(struct ibv_port_attr, pkey_tbl_len) FIELD(struct ibv_port_attr, lid)
	FIELD(struct ibv_port_attr, sm_lid) FIELD(struct ibv_port_attr, lmc)
	FIELD(struct ibv_port_attr, max_vl_num) FIELD(struct ibv_port_attr, sm_sl)
	FIELD(struct ibv_port_attr, subnet_timeout) FIELD(struct ibv_port_attr, init_type_reply)
	FIELD(struct ibv_port_attr, active_width) FIELD(struct ibv_port_attr, active_speed)
	FIELD(struct ibv_port_attr, phys_state) FIELD(struct ibv_port_attr, link_layer)
	FIELD(struct ibv_port_attr, flags) FIELD(struct ibv_port_attr, port_cap_flags2)
	FIELD(struct ibv_async_event, element) FIELD(struct ibv_async_event, element.cq)
	FIELD(struct ibv_async_event, element.qp) FIELD(struct ibv_async_event, element.srq)
	FIELD(struct ibv_async_event, element.wq) FIELD(struct ibv_async_event, element.port_num)
	FIELD(struct ibv_async_event, event_type)
}

int main(void)
{
	values_1();
	values_2();
	sizes();
	fields_1();
	fields_2();
	fields_3();
	return 0;
}
