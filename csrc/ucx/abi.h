/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What sluice uses of UCX, in its own words, so that neither its headers nor its
 * library are needed to build. Names are UCX's: testdata/facts.c is compiled
 * against this file and against <ucp/api/ucp.h>, and both must say the same.
 *
 * Every struct begins with a mask of the fields that are set, and UCX only ever
 * adds fields at the end: these declarations hold for any later 1.x.
 */
#ifndef SLUICE_UCX_ABI_H
#define SLUICE_UCX_ABI_H

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/socket.h>

/* The interface that was asked of ucp_init_version: nothing below is newer. */
#define SL_UCX_MAJOR 1
#define SL_UCX_MINOR 10

/* Packed: it is one byte wide, and so is what functions return. */
typedef enum {
	UCS_OK = 0,
	UCS_INPROGRESS = 1,
	UCS_ERR_IO_ERROR = -3,
	UCS_ERR_NO_MEMORY = -4,
	UCS_ERR_INVALID_PARAM = -5,
	UCS_ERR_INVALID_ADDR = -7,
	UCS_ERR_BUSY = -15,
	UCS_ERR_CANCELED = -16,
	UCS_ERR_LAST = -100
} __attribute__((packed)) ucs_status_t;

typedef void *ucs_status_ptr_t;

/* A request, or a status in the place of one. */
#define UCS_PTR_IS_ERR(p) (((uintptr_t)(p)) >= ((uintptr_t)UCS_ERR_LAST))
#define UCS_PTR_RAW_STATUS(p) ((ucs_status_t)(intptr_t)(p))

typedef enum { UCS_THREAD_MODE_SERIALIZED = 1 } ucs_thread_mode_t;
typedef enum { UCS_MEMORY_TYPE_HOST } ucs_memory_type_t;
typedef enum { UCP_ERR_HANDLING_MODE_PEER = 1 } ucp_err_handling_mode_t;

typedef struct {
	unsigned long ucs_bits[1024 / (8 * sizeof(unsigned long))];
} ucs_cpu_set_t;

typedef struct {
	const struct sockaddr *addr;
	socklen_t addrlen;
} ucs_sock_addr_t;

typedef struct ucp_context *ucp_context_h;
typedef struct ucp_config ucp_config_t;
typedef struct ucp_worker *ucp_worker_h;
typedef struct ucp_address ucp_address_t;
typedef struct ucp_ep *ucp_ep_h;
typedef struct ucp_conn_request *ucp_conn_request_h;
typedef struct ucp_mem *ucp_mem_h;
typedef uint64_t ucp_datatype_t;

enum {
	UCP_PARAM_FIELD_FEATURES = 1 << 0,
	UCP_PARAM_FIELD_MT_WORKERS_SHARED = 1 << 5,
	UCP_FEATURE_WAKEUP = 1 << 4,
	UCP_FEATURE_AM = 1 << 6
};

typedef struct {
	uint64_t field_mask;
	uint64_t features;
	size_t request_size;
	void (*request_init)(void *request);
	void (*request_cleanup)(void *request);
	uint64_t tag_sender_mask;
	int mt_workers_shared;
	size_t estimated_num_eps;
	size_t estimated_num_ppn;
	const char *name;
} ucp_params_t;

enum {
	UCP_WORKER_PARAM_FIELD_THREAD_MODE = 1 << 0
};

typedef struct {
	uint64_t field_mask;
	ucs_thread_mode_t thread_mode;
	ucs_cpu_set_t cpu_mask;
	unsigned events;
	void *user_data;
	int event_fd;
	uint64_t flags;
	const char *name;
	size_t am_alignment;
	uint64_t client_id;
} ucp_worker_params_t;

enum {
	UCP_EP_PARAM_FIELD_REMOTE_ADDRESS = 1 << 0,
	UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE = 1 << 1,
	UCP_EP_PARAM_FIELD_ERR_HANDLER = 1 << 2,
	UCP_EP_CLOSE_FLAG_FORCE = 1 << 0
};

typedef struct {
	void (*cb)(void *arg, ucp_ep_h ep, ucs_status_t status);
	void *arg;
} ucp_err_handler_t;

typedef struct {
	uint64_t field_mask;
	const ucp_address_t *address;
	ucp_err_handling_mode_t err_mode;
	ucp_err_handler_t err_handler;
	void *user_data;
	unsigned flags;
	ucs_sock_addr_t sockaddr;
	ucp_conn_request_h conn_request;
	const char *name;
	ucs_sock_addr_t local_sockaddr;
} ucp_ep_params_t;

enum {
	UCP_AM_HANDLER_PARAM_FIELD_ID = 1 << 0,
	UCP_AM_HANDLER_PARAM_FIELD_FLAGS = 1 << 1,
	UCP_AM_HANDLER_PARAM_FIELD_CB = 1 << 2,
	UCP_AM_HANDLER_PARAM_FIELD_ARG = 1 << 3,
	UCP_AM_FLAG_WHOLE_MSG = 1 << 0,
	UCP_AM_SEND_FLAG_EAGER = 1 << 1,
	UCP_AM_SEND_FLAG_RNDV = 1 << 2,
	UCP_AM_RECV_ATTR_FLAG_RNDV = 1 << 17
};

typedef struct {
	uint64_t recv_attr;
	ucp_ep_h reply_ep;
} ucp_am_recv_param_t;

typedef ucs_status_t (*ucp_am_recv_callback_t)(void *arg, const void *header, size_t header_length,
					       void *data, size_t length,
					       const ucp_am_recv_param_t *param);

typedef struct {
	uint64_t field_mask;
	unsigned id;
	uint32_t flags;
	ucp_am_recv_callback_t cb;
	void *arg;
} ucp_am_handler_param_t;

enum {
	UCP_OP_ATTR_FIELD_CALLBACK = 1 << 1,
	UCP_OP_ATTR_FIELD_USER_DATA = 1 << 2,
	UCP_OP_ATTR_FIELD_FLAGS = 1 << 4,
	UCP_OP_ATTR_FIELD_MEMORY_TYPE = 1 << 6
};

typedef struct {
	uint32_t op_attr_mask;
	uint32_t flags;
	void *request;
	union {
		void (*send)(void *request, ucs_status_t status, void *user_data);
		void (*recv_am)(void *request, ucs_status_t status, size_t length, void *user_data);
	} cb;
	ucp_datatype_t datatype;
	void *user_data;
	void *reply_buffer;
	ucs_memory_type_t memory_type;
	union {
		size_t *length;
	} recv_info;
	ucp_mem_h memh;
} ucp_request_param_t;

#endif
