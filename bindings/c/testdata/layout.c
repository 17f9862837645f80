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
	SIZE(sluice_kv_namespace_options);
	AT(sluice_kv_namespace_options, size), AT(sluice_kv_namespace_options, priority),
	    AT(sluice_kv_namespace_options, memory_quota);
	AT(sluice_kv_namespace_options, disk_quota), AT(sluice_kv_namespace_options, geometry),
	    AT(sluice_kv_namespace_options, name);
	AT(sluice_kv_namespace_options, hold_max), AT(sluice_kv_namespace_options, ttl_ns),
	    AT(sluice_kv_namespace_options, flow), AT(sluice_kv_namespace_options, reserved);
	SIZE(sluice_kv_axis);
	AT(sluice_kv_axis, by), AT(sluice_kv_axis, n), AT(sluice_kv_axis, reserved);
	SIZE(sluice_kv_place);
	AT(sluice_kv_place, size), AT(sluice_kv_place, loops_count), AT(sluice_kv_place, region),
	    AT(sluice_kv_place, base), AT(sluice_kv_place, stride);
	AT(sluice_kv_place, run), AT(sluice_kv_place, loops), AT(sluice_kv_place, slots);
	SIZE(sluice_kv_hint_result);
	AT(sluice_kv_hint_result, applied), AT(sluice_kv_hint_result, missing),
	    AT(sluice_kv_hint_result, refused);
	SIZE(sluice_kv_estimate);
	AT(sluice_kv_estimate, size), AT(sluice_kv_estimate, measured),
	    AT(sluice_kv_estimate, memory_blocks), AT(sluice_kv_estimate, disk_blocks);
	AT(sluice_kv_estimate, missing), AT(sluice_kv_estimate, memory_bytes),
	    AT(sluice_kv_estimate, disk_bytes), AT(sluice_kv_estimate, time_ns);
	SIZE(sluice_kv_key);
	AT(sluice_kv_key, bytes);
	SIZE(sluice_handoff_config);
	AT(sluice_handoff_config, size), AT(sluice_handoff_config, role),
	    AT(sluice_handoff_config, index), AT(sluice_handoff_config, reserved);
	AT(sluice_handoff_config, plan), AT(sluice_handoff_config, regions),
	    AT(sluice_handoff_config, peers), AT(sluice_handoff_config, regions_count);
	AT(sluice_handoff_config, peers_count), AT(sluice_handoff_config, options);
	SIZE(sluice_handoff_table);
	AT(sluice_handoff_table, blocks), AT(sluice_handoff_table, count);
	SIZE(sluice_ring_config);
	AT(sluice_ring_config, size), AT(sluice_ring_config, flags), AT(sluice_ring_config, path),
	    AT(sluice_ring_config, bytes), AT(sluice_ring_config, objects);
	AT(sluice_ring_config, readers), AT(sluice_ring_config, awaited),
	    AT(sluice_ring_config, note_length), AT(sluice_ring_config, note);
	AT(sluice_ring_config, patience_ns), AT(sluice_ring_config, frozen_ns);
	SIZE(sluice_ring_handle);
	AT(sluice_ring_handle, generation), AT(sluice_ring_handle, row),
	    AT(sluice_ring_handle, reserved);
	SIZE(sluice_ring_part);
	AT(sluice_ring_part, bytes), AT(sluice_ring_part, length);
	SIZE(sluice_sparse_config);
	AT(sluice_sparse_config, size), AT(sluice_sparse_config, layers),
	    AT(sluice_sparse_config, region), AT(sluice_sparse_config, base);
	AT(sluice_sparse_config, entry), AT(sluice_sparse_config, stride),
	    AT(sluice_sparse_config, sets), AT(sluice_sparse_config, slots);
	SIZE(sluice_sparse_batch);
	AT(sluice_sparse_batch, size), AT(sluice_sparse_batch, sets_count),
	    AT(sluice_sparse_batch, entries_count), AT(sluice_sparse_batch, shift);
	AT(sluice_sparse_batch, sets), AT(sluice_sparse_batch, entries),
	    AT(sluice_sparse_batch, blocks), AT(sluice_sparse_batch, starts);
	AT(sluice_sparse_batch, slots), AT(sluice_sparse_batch, missed),
	    AT(sluice_sparse_batch, counts), AT(sluice_sparse_batch, page);
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
	VALUE(SLUICE_ERR_READ_ONLY), VALUE(SLUICE_ERR_TIMEOUT), VALUE(SLUICE_ERR_FAULT),
	VALUE(SLUICE_ERR_MISSING);
	VALUE(SLUICE_FOREVER);
	VALUE(SLUICE_OPTIONAL), VALUE(SLUICE_NO_HUGE), VALUE(SLUICE_POPULATE),
	VALUE(SLUICE_MEMORY), VALUE(SLUICE_HOST);
	VALUE(SLUICE_DEVICE), VALUE(SLUICE_FILE), VALUE(SLUICE_READ_ONLY),
	VALUE(SLUICE_PRIVATE), VALUE(SLUICE_DMABUF);
	VALUE(SLUICE_READ), VALUE(SLUICE_WRITE), VALUE(SLUICE_DURABLE),
	VALUE(SLUICE_TEXT), VALUE(SLUICE_JSON);
	VALUE(SLUICE_KV_KEYS_MAX), VALUE(SLUICE_KV_IN_MEMORY), VALUE(SLUICE_KV_ON_DISK),
	VALUE(SLUICE_KV_COMING), VALUE(SLUICE_KV_CHAINS_MAX);
	VALUE(SLUICE_KV_UNDONE), VALUE(SLUICE_KV_DONE), VALUE(SLUICE_KV_KNOWN),
	VALUE(SLUICE_KV_MISSING), VALUE(SLUICE_KV_PENDING), VALUE(SLUICE_KV_DAMAGED);
	VALUE(SLUICE_KV_UNLIKE), VALUE(SLUICE_KV_CONFLICT), VALUE(SLUICE_KV_NO_ROOM),
	VALUE(SLUICE_KV_LATE), VALUE(SLUICE_KV_FAILED), VALUE(SLUICE_KV_BUSY);
	VALUE(SLUICE_KV_WRITE_THROUGH), VALUE(SLUICE_KV_WRITE_BACK), VALUE(SLUICE_KV_MEMORY_ONLY);
	VALUE(SLUICE_KV_SESSION_END), VALUE(SLUICE_KV_RETAIN), VALUE(SLUICE_KV_RELEASE),
	VALUE(SLUICE_KV_DEMOTE), VALUE(SLUICE_KV_PREFETCH);
	VALUE(SLUICE_HANDOFF_SENDER), VALUE(SLUICE_HANDOFF_RECEIVER), VALUE(SLUICE_HANDOFF_PLAN_MAX),
	VALUE(SLUICE_RING_SUMS), VALUE(SLUICE_SPARSE_NONE);
	return 0;
}
