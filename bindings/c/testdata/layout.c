// SPDX-License-Identifier: Apache-2.0
// Prints what a program that was built with sluice.h relies on. Also compiled as C++.
#include <stddef.h>
#include <stdio.h>

#include "sluice.h"

#define SIZE(s) printf("%s %zu\n", #s, sizeof(struct s))
#define AT(s, f)                                                                                   \
	printf("%s.%s %zu %zu\n", #s, #f, offsetof(struct s, f), sizeof(((struct s *)0)->f))
#define VALUE(v) printf("%s %lld\n", #v, (long long)(v))

int main(void)
{
	VALUE(SLUICE_ABI_VERSION);
	SIZE(sluice_backend);
	AT(sluice_backend, name), AT(sluice_backend, options), AT(sluice_backend, flags),
	    AT(sluice_backend, reserved);
	SIZE(sluice_config);
	AT(sluice_config, size), AT(sluice_config, flags), AT(sluice_config, name),
	    AT(sluice_config, backends);
	AT(sluice_config, backends_count), AT(sluice_config, transfer_timeout_ns),
	    AT(sluice_config, abort_grace_ns);
	AT(sluice_config, connect_timeout_ns), AT(sluice_config, handshake_timeout_ns),
	    AT(sluice_config, spin_ns);
	AT(sluice_config, staging_bytes), AT(sluice_config, description_max),
	    AT(sluice_config, transfers_max);
	AT(sluice_config, regions_max), AT(sluice_config, leases_max), AT(sluice_config, peers_max);
	AT(sluice_config, notifications_max), AT(sluice_config, handshakes_max);
	AT(sluice_config, cert_file), AT(sluice_config, key_file), AT(sluice_config, ca_file);
	SIZE(sluice_alloc_options);
	AT(sluice_alloc_options, size), AT(sluice_alloc_options, flags),
	    AT(sluice_alloc_options, node);
	AT(sluice_alloc_options, reserved);
	SIZE(sluice_segment);
	AT(sluice_segment, size), AT(sluice_segment, kind), AT(sluice_segment, flags),
	    AT(sluice_segment, device);
	AT(sluice_segment, length), AT(sluice_segment, offset), AT(sluice_segment, memory),
	    AT(sluice_segment, host);
	AT(sluice_segment, device_address), AT(sluice_segment, dmabuf_offset),
	    AT(sluice_segment, dmabuf), AT(sluice_segment, file);
	SIZE(sluice_desc);
	AT(sluice_desc, local), AT(sluice_desc, remote), AT(sluice_desc, length);
	SIZE(sluice_copy);
	AT(sluice_copy, region), AT(sluice_copy, remote), AT(sluice_copy, desc);
	SIZE(sluice_route);
	AT(sluice_route, size), AT(sluice_route, flags), AT(sluice_route, only);
	SIZE(sluice_pages);
	AT(sluice_pages, size), AT(sluice_pages, flags), AT(sluice_pages, count),
	    AT(sluice_pages, entry_length);
	AT(sluice_pages, local_base), AT(sluice_pages, local_stride), AT(sluice_pages, remote_base),
	    AT(sluice_pages, remote_stride);
	AT(sluice_pages, local), AT(sluice_pages, remote);
	SIZE(sluice_loop);
	AT(sluice_loop, local), AT(sluice_loop, remote), AT(sluice_loop, n),
	    AT(sluice_loop, reserved);
	SIZE(sluice_side);
	AT(sluice_side, base), AT(sluice_side, stride), AT(sluice_side, step),
	    AT(sluice_side, first), AT(sluice_side, per);
	AT(sluice_side, list);
	SIZE(sluice_pattern);
	AT(sluice_pattern, size), AT(sluice_pattern, flags), AT(sluice_pattern, count),
	    AT(sluice_pattern, run);
	AT(sluice_pattern, loops_count), AT(sluice_pattern, reserved), AT(sluice_pattern, loops);
	AT(sluice_pattern, local), AT(sluice_pattern, remote);
	SIZE(sluice_completion);
	AT(sluice_completion, transfer), AT(sluice_completion, word), AT(sluice_completion, status),
	    AT(sluice_completion, reserved);
	SIZE(sluice_notification);
	AT(sluice_notification, size), AT(sluice_notification, status),
	    AT(sluice_notification, peer), AT(sluice_notification, length),
	    AT(sluice_notification, more), AT(sluice_notification, reserved);
	SIZE(sluice_lease_options);
	AT(sluice_lease_options, size), AT(sluice_lease_options, flags),
	    AT(sluice_lease_options, ttl_ns);
	VALUE(SLUICE_OK), VALUE(SLUICE_PENDING), VALUE(SLUICE_ERR_HANDLE),
	VALUE(SLUICE_ERR_ARGUMENT), VALUE(SLUICE_ERR_FORK);
	VALUE(SLUICE_ERR_SPACE), VALUE(SLUICE_ERR_SYSTEM), VALUE(SLUICE_ERR_CLOSED),
	VALUE(SLUICE_ERR_UNAVAILABLE);
	VALUE(SLUICE_ERR_NOT_SUPPORTED), VALUE(SLUICE_ERR_FULL), VALUE(SLUICE_ERR_BUSY),
	VALUE(SLUICE_ERR_BOUNDS);
	VALUE(SLUICE_ERR_PEER_LOST), VALUE(SLUICE_ERR_ABORTED), VALUE(SLUICE_ERR_REVOKED),
	VALUE(SLUICE_ERR_VERSION);
	VALUE(SLUICE_ERR_NO_ROUTE), VALUE(SLUICE_ERR_CORRUPT), VALUE(SLUICE_ERR_TOKEN),
	VALUE(SLUICE_ERR_UNPROVEN);
	VALUE(SLUICE_ERR_READ_ONLY), VALUE(SLUICE_ERR_TIMEOUT), VALUE(SLUICE_ERR_FAULT);
	VALUE(SLUICE_FOREVER);
	VALUE(SLUICE_OPTIONAL), VALUE(SLUICE_NO_HUGE), VALUE(SLUICE_POPULATE),
	VALUE(SLUICE_MEMORY), VALUE(SLUICE_HOST);
	VALUE(SLUICE_DEVICE), VALUE(SLUICE_FILE), VALUE(SLUICE_READ_ONLY),
	VALUE(SLUICE_PRIVATE), VALUE(SLUICE_DMABUF);
	VALUE(SLUICE_READ), VALUE(SLUICE_WRITE), VALUE(SLUICE_DURABLE),
	VALUE(SLUICE_TEXT), VALUE(SLUICE_JSON);
	return 0;
}
