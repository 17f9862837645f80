// SPDX-License-Identifier: Apache-2.0

package handoff

import (
	"unsafe"

	"github.com/sluicehq/sluice/engine"
)

// bytesOf is the memory of a region: HBM is that of the software stand-in, which is the host's.
func bytesOf(r *engine.Region) []byte {
	if r.Kind() != engine.HBM {
		return r.Bytes()
	}
	seg := r.Segment()
	at := *(*unsafe.Pointer)(unsafe.Pointer(&seg.Addr)) // an address, and no memory of Go
	return unsafe.Slice((*byte)(at), seg.Len)
}
