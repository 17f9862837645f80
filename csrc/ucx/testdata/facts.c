/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Prints what abi.h claims, or with -DREAL what UCX's own headers say: sizes,
 * offsets and values, a line each. With -DREAL it does not compile unless every
 * prototype in calls.h is UCX's.
 */
#ifdef REAL
#include <ucp/api/ucp.h>
#else
#include "abi.h"
#endif
#include "calls.h"

#include <stdio.h>

#ifdef REAL
#define SAME(ret, name, args)                                                                      \
	_Static_assert(__builtin_types_compatible_p(__typeof__(&name), ret(*) args),               \
		       #name " has another prototype");
SL_UCX_CALLS(SAME)
#endif

#define VALUE(v) printf("%s = %lld\n", #v, (long long)(v));
#define SIZE(t) printf("sizeof %s = %zu\n", #t, sizeof(t));
#define FIELD(t, f)                                                                                \
	printf("%s.%s at %zu, %zu bytes\n", #t, #f, offsetof(t, f), sizeof(((t *)0)->f));

static void values(void)
{
	VALUE(UCS_OK) VALUE(UCS_INPROGRESS) VALUE(UCS_ERR_IO_ERROR) VALUE(UCS_ERR_NO_MEMORY)
	VALUE(UCS_ERR_INVALID_PARAM) VALUE(UCS_ERR_INVALID_ADDR) VALUE(UCS_ERR_BUSY)
	VALUE(UCS_ERR_CANCELED) VALUE(UCS_ERR_LAST)
	VALUE(UCS_PTR_IS_ERR((void *)(intptr_t)-100)) VALUE(UCS_PTR_IS_ERR((void *)(intptr_t)-101))
	VALUE(UCS_PTR_IS_ERR((void *)(intptr_t)-1)) VALUE(UCS_PTR_IS_ERR(NULL))
	VALUE(UCS_PTR_RAW_STATUS((void *)(intptr_t)-80))
	VALUE(UCS_THREAD_MODE_SERIALIZED) VALUE(UCS_MEMORY_TYPE_HOST)
	VALUE(UCP_ERR_HANDLING_MODE_PEER)
	VALUE(UCP_PARAM_FIELD_FEATURES)
	VALUE(UCP_PARAM_FIELD_MT_WORKERS_SHARED)
	VALUE(UCP_FEATURE_WAKEUP) VALUE(UCP_FEATURE_AM)
	VALUE(UCP_WORKER_PARAM_FIELD_THREAD_MODE)
	VALUE(UCP_EP_PARAM_FIELD_REMOTE_ADDRESS) VALUE(UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE)
	VALUE(UCP_EP_PARAM_FIELD_ERR_HANDLER)
	VALUE(UCP_EP_CLOSE_FLAG_FORCE)
	VALUE(UCP_AM_HANDLER_PARAM_FIELD_ID) VALUE(UCP_AM_HANDLER_PARAM_FIELD_FLAGS)
	VALUE(UCP_AM_HANDLER_PARAM_FIELD_CB) VALUE(UCP_AM_HANDLER_PARAM_FIELD_ARG)
	VALUE(UCP_AM_FLAG_WHOLE_MSG)
	VALUE(UCP_AM_SEND_FLAG_EAGER) VALUE(UCP_AM_SEND_FLAG_RNDV)
	VALUE(UCP_AM_RECV_ATTR_FLAG_RNDV)
	VALUE(UCP_OP_ATTR_FIELD_CALLBACK) VALUE(UCP_OP_ATTR_FIELD_USER_DATA)
	VALUE(UCP_OP_ATTR_FIELD_FLAGS)
	VALUE(UCP_OP_ATTR_FIELD_MEMORY_TYPE)
}

static void structs(void)
{
	SIZE(ucs_status_t) SIZE(ucs_status_ptr_t) SIZE(ucs_thread_mode_t) SIZE(ucs_memory_type_t)
	SIZE(ucp_err_handling_mode_t) SIZE(ucp_datatype_t) SIZE(ucs_cpu_set_t) SIZE(ucs_sock_addr_t)
	SIZE(ucp_err_handler_t) SIZE(ucp_params_t) SIZE(ucp_worker_params_t) SIZE(ucp_ep_params_t)
	SIZE(ucp_request_param_t)
	SIZE(ucp_am_recv_param_t) SIZE(ucp_am_handler_param_t)
	SIZE(ucp_am_recv_callback_t)
	FIELD(ucp_am_recv_param_t, recv_attr) FIELD(ucp_am_recv_param_t, reply_ep)
	FIELD(ucp_am_handler_param_t, field_mask) FIELD(ucp_am_handler_param_t, id)
	FIELD(ucp_am_handler_param_t, flags) FIELD(ucp_am_handler_param_t, cb)
	FIELD(ucp_am_handler_param_t, arg)
	FIELD(ucs_sock_addr_t, addr) FIELD(ucs_sock_addr_t, addrlen)
	FIELD(ucs_cpu_set_t, ucs_bits)
	FIELD(ucp_err_handler_t, cb) FIELD(ucp_err_handler_t, arg)
	FIELD(ucp_params_t, field_mask) FIELD(ucp_params_t, features)
	FIELD(ucp_params_t, request_size)
	FIELD(ucp_params_t, request_init) FIELD(ucp_params_t, request_cleanup)
	FIELD(ucp_params_t, tag_sender_mask)
	FIELD(ucp_params_t, mt_workers_shared) FIELD(ucp_params_t, estimated_num_eps)
	FIELD(ucp_params_t, estimated_num_ppn) FIELD(ucp_params_t, name)
	FIELD(ucp_worker_params_t, field_mask) FIELD(ucp_worker_params_t, thread_mode)
	FIELD(ucp_worker_params_t, cpu_mask) FIELD(ucp_worker_params_t, events)
	FIELD(ucp_worker_params_t, user_data) FIELD(ucp_worker_params_t, event_fd)
	FIELD(ucp_worker_params_t, flags) FIELD(ucp_worker_params_t, name)
	FIELD(ucp_worker_params_t, am_alignment) FIELD(ucp_worker_params_t, client_id)
	FIELD(ucp_ep_params_t, field_mask) FIELD(ucp_ep_params_t, address)
	FIELD(ucp_ep_params_t, err_mode)
	FIELD(ucp_ep_params_t, err_handler) FIELD(ucp_ep_params_t, user_data)
	FIELD(ucp_ep_params_t, flags)
	FIELD(ucp_ep_params_t, sockaddr) FIELD(ucp_ep_params_t, conn_request)
	FIELD(ucp_ep_params_t, name)
	FIELD(ucp_ep_params_t, local_sockaddr)
	FIELD(ucp_request_param_t, op_attr_mask) FIELD(ucp_request_param_t, flags)
	FIELD(ucp_request_param_t, request) FIELD(ucp_request_param_t, cb)
	FIELD(ucp_request_param_t, cb.send)
	FIELD(ucp_request_param_t, cb.recv_am) FIELD(ucp_request_param_t, datatype)
	FIELD(ucp_request_param_t, user_data) FIELD(ucp_request_param_t, reply_buffer)
	FIELD(ucp_request_param_t, memory_type) FIELD(ucp_request_param_t, recv_info)
	FIELD(ucp_request_param_t, recv_info.length) FIELD(ucp_request_param_t, memh)
}

int main(void)
{
	values();
	structs();
	return 0;
}
