// SPDX-License-Identifier: Apache-2.0

package replay

import (
	"errors"
	"unsafe"

	"golang.org/x/sys/unix"
)

// mapRing maps slots of a descriptor in turn, count of them one behind the other.
func mapRing(fd int, slot uint64, slots, count int) ([]byte, error) {
	size := uintptr(slot) * uintptr(count)
	base, err := unix.MmapPtr(-1, 0, nil, size, unix.PROT_NONE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|
		unix.MAP_NORESERVE)
	if err != nil {
		return nil, err
	}
	for i := range count {
		at := unsafe.Add(base, uintptr(slot)*uintptr(i))
		_, err := unix.MmapPtr(fd, int64(slot)*int64(i%slots), at, uintptr(slot),
			unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_FIXED)
		if err != nil {
			return nil, errors.Join(err, unix.MunmapPtr(base, size))
		}
	}
	return unsafe.Slice((*byte)(base), size), nil
}

func unmapRing(mem []byte) error {
	return unix.MunmapPtr(unsafe.Pointer(unsafe.SliceData(mem)), uintptr(len(mem)))
}
