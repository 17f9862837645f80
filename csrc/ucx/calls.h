/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The functions of libucp that sluice calls: one list makes the table, fills it,
 * and is held against the prototypes of UCX's headers by testdata/facts.c.
 * ucs_status_string lives in libucs, which dlsym finds through libucp.
 */
#ifndef SLUICE_UCX_CALLS_H
#define SLUICE_UCX_CALLS_H

#define SL_UCX_CALLS(X)                                                                            \
	X(const char *, ucs_status_string, (ucs_status_t))                                         \
	X(void, ucp_get_version, (unsigned *, unsigned *, unsigned *))                             \
	X(const char *, ucp_get_version_string, (void))                                            \
	X(ucs_status_t, ucp_config_read, (const char *, const char *, ucp_config_t **))            \
	X(void, ucp_config_release, (ucp_config_t *))                                              \
	X(ucs_status_t, ucp_config_modify, (ucp_config_t *, const char *, const char *))           \
	X(ucs_status_t, ucp_init_version,                                                          \
	  (unsigned, unsigned, const ucp_params_t *, const ucp_config_t *, ucp_context_h *))       \
	X(void, ucp_cleanup, (ucp_context_h))                                                      \
	X(ucs_status_t, ucp_worker_create,                                                         \
	  (ucp_context_h, const ucp_worker_params_t *, ucp_worker_h *))                            \
	X(void, ucp_worker_destroy, (ucp_worker_h))                                                \
	X(ucs_status_t, ucp_worker_get_address, (ucp_worker_h, ucp_address_t **, size_t *))        \
	X(void, ucp_worker_release_address, (ucp_worker_h, ucp_address_t *))                       \
	X(unsigned, ucp_worker_progress, (ucp_worker_h))                                           \
	X(ucs_status_t, ucp_worker_get_efd, (ucp_worker_h, int *))                                 \
	X(ucs_status_t, ucp_worker_arm, (ucp_worker_h))                                            \
	X(ucs_status_t, ucp_worker_signal, (ucp_worker_h))                                         \
	X(ucs_status_ptr_t, ucp_worker_flush_nbx, (ucp_worker_h, const ucp_request_param_t *))     \
	X(ucs_status_t, ucp_ep_create, (ucp_worker_h, const ucp_ep_params_t *, ucp_ep_h *))        \
	X(ucs_status_ptr_t, ucp_ep_close_nbx, (ucp_ep_h, const ucp_request_param_t *))             \
	X(ucs_status_ptr_t, ucp_ep_flush_nbx, (ucp_ep_h, const ucp_request_param_t *))             \
	X(ucs_status_t, ucp_worker_set_am_recv_handler,                                            \
	  (ucp_worker_h, const ucp_am_handler_param_t *))                                          \
	X(ucs_status_ptr_t, ucp_am_send_nbx,                                                       \
	  (ucp_ep_h, unsigned, const void *, size_t, const void *, size_t,                         \
	   const ucp_request_param_t *))                                                           \
	X(void, ucp_ep_print_info, (ucp_ep_h, FILE *))                                             \
	X(ucs_status_t, ucp_request_check_status, (void *))                                        \
	X(void, ucp_request_free, (void *))

#endif
