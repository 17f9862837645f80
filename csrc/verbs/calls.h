/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The functions of libibverbs that sluice calls, each with the version of its symbol, since
 * several exist in an older one, too: one list makes the table, fills it, and is held against
 * the prototypes of libibverbs' headers by testdata/facts.c. Requests are posted and
 * completions taken through the table of a context.
 */
#ifndef SLUICE_VERBS_CALLS_H
#define SLUICE_VERBS_CALLS_H

#define SL_VERBS_CALLS(X)                                                                          \
	X("IBVERBS_1.1", struct ibv_device **, ibv_get_device_list, (int *))                       \
	X("IBVERBS_1.1", void, ibv_free_device_list, (struct ibv_device **))                       \
	X("IBVERBS_1.1", struct ibv_context *, ibv_open_device, (struct ibv_device *))             \
	X("IBVERBS_1.1", int, ibv_close_device, (struct ibv_context *))                            \
	X("IBVERBS_1.1", int, ibv_get_async_event,                                                 \
	  (struct ibv_context *, struct ibv_async_event *))                                        \
	X("IBVERBS_1.1", void, ibv_ack_async_event, (struct ibv_async_event *))                    \
	X("IBVERBS_1.1", int, ibv_query_device, (struct ibv_context *, struct ibv_device_attr *))  \
	X("IBVERBS_1.1", int, ibv_query_port,                                                      \
	  (struct ibv_context *, uint8_t, struct _compat_ibv_port_attr *))                         \
	X("IBVERBS_1.1", int, ibv_query_gid,                                                       \
	  (struct ibv_context *, uint8_t, int, union ibv_gid *))                                   \
	X("IBVERBS_1.1", struct ibv_pd *, ibv_alloc_pd, (struct ibv_context *))                    \
	X("IBVERBS_1.1", int, ibv_dealloc_pd, (struct ibv_pd *))                                   \
	X("IBVERBS_1.1", struct ibv_mr *, ibv_reg_mr, (struct ibv_pd *, void *, size_t, int))      \
	X("IBVERBS_1.8", struct ibv_mr *, ibv_reg_mr_iova2,                                        \
	  (struct ibv_pd *, void *, size_t, uint64_t, unsigned int))                               \
	X("IBVERBS_1.1", int, ibv_dereg_mr, (struct ibv_mr *))                                     \
	X("IBVERBS_1.0", struct ibv_comp_channel *, ibv_create_comp_channel,                       \
	  (struct ibv_context *))                                                                  \
	X("IBVERBS_1.0", int, ibv_destroy_comp_channel, (struct ibv_comp_channel *))               \
	X("IBVERBS_1.1", struct ibv_cq *, ibv_create_cq,                                           \
	  (struct ibv_context *, int, void *, struct ibv_comp_channel *, int))                     \
	X("IBVERBS_1.1", int, ibv_destroy_cq, (struct ibv_cq *))                                   \
	X("IBVERBS_1.1", int, ibv_get_cq_event,                                                    \
	  (struct ibv_comp_channel *, struct ibv_cq **, void **))                                  \
	X("IBVERBS_1.1", void, ibv_ack_cq_events, (struct ibv_cq *, unsigned int))                 \
	X("IBVERBS_1.1", struct ibv_srq *, ibv_create_srq,                                         \
	  (struct ibv_pd *, struct ibv_srq_init_attr *))                                           \
	X("IBVERBS_1.1", int, ibv_destroy_srq, (struct ibv_srq *))                                 \
	X("IBVERBS_1.1", struct ibv_qp *, ibv_create_qp,                                           \
	  (struct ibv_pd *, struct ibv_qp_init_attr *))                                            \
	X("IBVERBS_1.1", int, ibv_modify_qp, (struct ibv_qp *, struct ibv_qp_attr *, int))         \
	X("IBVERBS_1.1", int, ibv_destroy_qp, (struct ibv_qp *))

/* NULL where the library is older. */
#define SL_VERBS_OPTIONAL_CALLS(X)                                                                 \
	X("IBVERBS_1.12", struct ibv_mr *, ibv_reg_dmabuf_mr,                                      \
	  (struct ibv_pd *, uint64_t, size_t, uint64_t, int, int))

#endif
