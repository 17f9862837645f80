// SPDX-License-Identifier: Apache-2.0
// A range that is leased, its bounds, its end by revoking and by time.
#include <unistd.h>

#include "check.h"

/* A token of memory that is gone is unknown. */
static int is_over(int code) { return code == SLUICE_ERR_REVOKED || code == SLUICE_ERR_TOKEN; }

int main(void)
{
	struct end a = open_end("a", "mem", 1 << 20), b = open_end("b", "mem", 1 << 20);
	sluice_remote there, leased;
	sluice_peer peer = connect_ends(&a, &b, &there);
	sluice_lease lease;
	WANT(SLUICE_ERR_BOUNDS, sluice_lease_grant(b.region, 1 << 20, 1, NULL, &lease));
	OK(sluice_lease_grant(b.region, 4096, 4096, NULL, &lease));
	char token[1024];
	size_t length, needs;
	WANT(SLUICE_ERR_SPACE, sluice_lease_token(lease, token, 1, &needs));
	OK(sluice_lease_token(lease, token, sizeof token, &length));
	TRUE(needs == length);
	OK(sluice_remote_import(peer, token, length, &leased));
	uint64_t bytes;
	OK(sluice_remote_length(leased, &bytes));
	TRUE(bytes == 4096);

	memset(a.bytes, 'l', 4096);
	sluice_transfer t = new_transfer(peer, SLUICE_WRITE);
	struct sluice_desc outside = {0, 1, 4096};
	WANT(SLUICE_ERR_BOUNDS, sluice_transfer_add(t, a.region, leased, &outside, 1));
	add_one(t, a.region, leased, 0, 0, 4096);
	OK(sluice_post(t));
	OK(sluice_wait(t, LIMIT));
	TRUE(b.bytes[4095] == 0 && b.bytes[4096] == 'l' && b.bytes[8191] == 'l' &&
	     b.bytes[8192] == 0);
	WANT(SLUICE_ERR_BUSY, sluice_region_close(b.region));

	int ended = -1;
	OK(sluice_lease_ended(lease, &ended));
	TRUE(!ended);
	OK(sluice_lease_revoke(lease, LIMIT));
	WANT(SLUICE_ERR_HANDLE, sluice_lease_ended(lease, &ended));
	WANT(SLUICE_ERR_HANDLE, sluice_lease_revoke(lease, LIMIT));
	memset(b.bytes, 0, 1 << 20);
	OK(sluice_post(t));
	WANT(SLUICE_ERR_REVOKED, sluice_wait(t, LIMIT));
	WANT(SLUICE_ERR_REVOKED, sluice_test(t));
	TRUE(b.bytes[4096] == 0);
	TRUE(is_over(sluice_remote_import(peer, token, length, &leased)));
	token[length / 2] ^= 1;
	TRUE(sluice_remote_import(peer, token, length, &leased) < 0);

	struct sluice_lease_options options = {.size = sizeof options, .flags = SLUICE_READ_ONLY};
	OK(sluice_lease_grant(b.region, 0, 8, &options, &lease));
	OK(sluice_lease_token(lease, token, sizeof token, &length));
	OK(sluice_remote_import(peer, token, length, &leased));
	OK(sluice_reset(t));
	struct sluice_desc desc = {0, 0, 8};
	WANT(SLUICE_ERR_READ_ONLY, sluice_transfer_add(t, a.region, leased, &desc, 1));
	OK(sluice_lease_revoke(lease, LIMIT));

	options.flags = 0;
	options.ttl_ns = 1000000;
	OK(sluice_lease_grant(b.region, 0, 8, &options, &lease));
	OK(sluice_lease_token(lease, token, sizeof token, &length));
	int code = SLUICE_OK;
	for (int i = 0; i < 60000 && !is_over(code); i++, usleep(1000))
		if ((code = sluice_remote_import(peer, token, length, &leased)) == SLUICE_OK)
			OK(sluice_remote_close(leased));
	TRUE(is_over(code));
	for (int i = 0; i < 60000 && !ended; i++, usleep(1000))
		OK(sluice_lease_ended(lease, &ended));
	TRUE(ended);
	OK(sluice_lease_revoke(lease, LIMIT)); // its handle is still there to be given back
	OK(sluice_transfer_close(t));
	OK(sluice_region_close(b.region));
	close_end(&a);
	close_end(&b);
	puts("ok");
	return 0;
}
