/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A peer that keeps to no rule: it sends the active messages that its standard input
 * spells, and prints what it gets.
 *
 *   connect ADDRESS         in hex
 *   send e|r HEAD DATA      eager or by rendezvous; DATA in hex, or #N: N bytes
 *   poll MS
 *   quiet                   from now on it takes nothing that comes
 *
 * Each is answered with a line "done"; before it "got HEAD LENGTH" for each message. At first it
 * says "address".
 */
#define _GNU_SOURCE
#include "load.h"
#include "message.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

static ucp_worker_h worker;
static ucp_ep_h peer;
static char line[1 << 20];

static void fail(const char *what)
{
	fprintf(stderr, "%s\n", what);
	exit(1);
}

static void put_hex(const char *word, const void *bytes, size_t n)
{
	const uint8_t *p = bytes;

	printf("%s ", word);
	for (size_t i = 0; i < n; i++)
		printf("%02x", p[i]);
}

static size_t get_hex(const char *text, uint8_t *out)
{
	size_t n = 0;
	unsigned byte;

	for (; sscanf(text + 2 * n, "%2x", &byte) == 1; n++)
		out[n] = (uint8_t)byte;
	return n;
}

static ucs_status_t on_message(void *arg, const void *head, size_t head_len, void *data, size_t len,
			       const ucp_am_recv_param_t *param)
{
	(void)arg;
	unsigned char first = len ? *(const unsigned char *)data : 0;

	(void)param;
	put_hex("got", head, head_len);
	printf(" %zu %d\n", len, first);
	return UCS_OK;
}

static void progress(long ms)
{
	struct timespec t;
	int64_t end;

	clock_gettime(CLOCK_MONOTONIC, &t);
	end = t.tv_sec * 1000 + t.tv_nsec / 1000000 + ms;
	do {
		for (int i = 0; i < 100; i++)
			sl_ucx.ucp_worker_progress(worker);
		clock_gettime(CLOCK_MONOTONIC, &t);
	} while (t.tv_sec * 1000 + t.tv_nsec / 1000000 < end);
}

static void open_all(void)
{
	ucp_params_t params = {.field_mask = UCP_PARAM_FIELD_FEATURES,
			       .features = UCP_FEATURE_AM};
	ucp_worker_params_t single = {.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE};
	ucp_am_handler_param_t handler = {
		.field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_FLAGS |
			      UCP_AM_HANDLER_PARAM_FIELD_CB,
		.id = SL_UCX_AM,
		.flags = UCP_AM_FLAG_WHOLE_MSG,
		.cb = on_message,
	};
	char why[256];
	ucp_config_t *config;
	ucp_context_h context;
	ucp_address_t *address;
	size_t len;

	if (sl_ucx_load("libucp.so.0", why, sizeof(why)) != 0)
		fail(why);
	if (sl_ucx.ucp_config_read(NULL, NULL, &config) != UCS_OK ||
	    sl_ucx.ucp_init_version(SL_UCX_MAJOR, SL_UCX_MINOR, &params, config, &context) !=
		UCS_OK ||
	    sl_ucx.ucp_worker_create(context, &single, &worker) != UCS_OK ||
	    sl_ucx.ucp_worker_set_am_recv_handler(worker, &handler) != UCS_OK ||
	    sl_ucx.ucp_worker_get_address(worker, &address, &len) != UCS_OK)
		fail("open");
	put_hex("address", address, len);
	printf("\n");
}

static void reach(const char *text)
{
	uint8_t *address = calloc(1, strlen(text));
	ucp_ep_params_t params = {
	    .field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE,
	    .address = (const ucp_address_t *)address,
	    .err_mode = UCP_ERR_HANDLING_MODE_PEER,
	};

	get_hex(text, address);
	if (sl_ucx.ucp_ep_create(worker, &params, &peer) != UCS_OK)
		fail("connect");
}

static int quiet; /* it takes nothing that comes */

static void spell(char how, const char *head, const char *data)
{
	ucp_request_param_t param = {
		.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS,
		.flags = how == 'r' ? UCP_AM_SEND_FLAG_RNDV : UCP_AM_SEND_FLAG_EAGER,
	};
	size_t room = strlen(head) + 1,
	       len = data[0] == '#' ? strtoull(data + 1, NULL, 10) : strlen(data) / 2;
	uint8_t *h = malloc(room), *body = malloc(len + 1); /* UCX may come back to them */
	size_t head_len = get_hex(head, h);

	if (data[0] == '#')
		memset(body, 0xee, len);
	else
		get_hex(data, body);
	sl_ucx.ucp_am_send_nbx(peer, SL_UCX_AM, h, head_len, body, len, &param);
	if (!quiet)
		progress(1);
}

int main(void)
{
	static char head[4096];
	int at;

	open_all();
	for (;;) {
		printf("done\n");
		fflush(stdout);
		if (!fgets(line, sizeof(line), stdin))
			return 0;
		line[strcspn(line, "\n")] = 0;
		if (strncmp(line, "connect ", 8) == 0)
			reach(line + 8);
		else if (strncmp(line, "poll ", 5) == 0)
			progress(atol(line + 5));
		else if (strcmp(line, "quiet") == 0)
			quiet = 1;
		else if (sscanf(line, "send %*c %4095s %n", head, &at) == 1)
			spell(line[5], head, line + at);
		else
			fail(line);
	}
}
