// SPDX-License-Identifier: Apache-2.0

package main

// #include "faces.h"
import "C"

import (
	"context"
	"time"

	"github.com/sluicehq/sluice/engine"
)

// lease is the object of a lease handle.
type lease struct {
	of *openEngine
	l  *engine.Lease
}

//export slgoLeaseGrant
func slgoLeaseGrant(h, offset, length C.uint64_t, o *C.struct_sluice_lease_options, out *C.uint64_t,
	f *C.struct_slgo_fault) C.int {
	r, err := regions.get(uint64(h))
	if err != nil {
		return answer(f, err)
	}
	if o.flags&^C.SLUICE_READ_ONLY != 0 {
		return answer(f, argument("sluice_lease_options.flags is %#x: there is SLUICE_READ_ONLY",
			o.flags))
	}
	l, err := r.r.Lease(uint64(offset), uint64(length), engine.LeaseOptions{
		TTL: time.Duration(o.ttl_ns), ReadOnly: o.flags&C.SLUICE_READ_ONLY != 0,
	})
	if err != nil {
		return answer(f, err)
	}
	handle, err := adopt(r.of, &leases, &lease{of: r.of, l: l})
	if err != nil {
		// bounded by the backends; the engine's Close does it otherwise
		_ = l.Revoke(context.Background())
		return answer(f, err)
	}
	*out = C.uint64_t(handle)
	return C.SLUICE_OK
}

//export slgoLeaseToken
func slgoLeaseToken(h C.uint64_t, buffer *C.uint8_t, capacity C.size_t, length *C.size_t,
	f *C.struct_slgo_fault) C.int {
	l, err := leases.get(uint64(h))
	if err != nil {
		return answer(f, err)
	}
	return hand(l.l.Token(), buffer, capacity, length, f)
}

//export slgoLeaseEnded
func slgoLeaseEnded(h C.uint64_t, ended *C.int, f *C.struct_slgo_fault) C.int {
	l, err := leases.get(uint64(h))
	if err != nil {
		return answer(f, err)
	}
	*ended = isClosed(l.l.Revoked())
	return C.SLUICE_OK
}

// isClosed returns 1 if the channel is closed.
func isClosed(c <-chan struct{}) C.int {
	select {
	case <-c:
		return 1
	default:
		return 0
	}
}

//export slgoLeaseRevoke
func slgoLeaseRevoke(h C.uint64_t, timeout C.int64_t, f *C.struct_slgo_fault) C.int {
	l, err := leases.get(uint64(h))
	if err != nil {
		return answer(f, err)
	}
	ctx, cancel := within(timeout)
	defer cancel()
	if err = l.l.Revoke(ctx); err == nil {
		leases.drop(uint64(h))
	}
	return answer(f, err)
}
