// SPDX-License-Identifier: Apache-2.0

package main

// #include "faces.h"
import "C"

import (
	"math"
	"unsafe"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/engine"
)

// inPlace is n elements of the caller's memory, without a copy. T and P have the same
// layout. What it returns must not outlive the call, unless sluice.h says that the memory
// stays.
func inPlace[T, P any](p *P, n uint64, what string) ([]T, error) {
	switch {
	case n == 0:
		return nil, nil
	case p == nil:
		return nil, argument("%s is NULL, with %d elements", what, n)
	}
	room := uint64(math.MaxInt) - min(uint64(uintptr(unsafe.Pointer(p))), math.MaxInt)
	if n > room/uint64(unsafe.Sizeof(*p)) {
		return nil, argument("%s: %d elements of %d bytes do not fit into the address space", what,
			n, unsafe.Sizeof(*p))
	}
	return unsafe.Slice((*T)(unsafe.Pointer(p)), n), nil
}

// setText leaves the text of an error with the thread that called, cut to what fits.
func setText(f *C.struct_slgo_fault, text string) {
	dst := unsafe.Slice((*byte)(unsafe.Pointer(&f.text[0])), len(f.text))
	n := copy(dst[:len(dst)-1], text)
	dst[n] = 0
}

// hand copies b into a buffer of the caller's and says how long it is.
func hand(b []byte, buffer *C.uint8_t, capacity C.size_t, length *C.size_t,
	f *C.struct_slgo_fault) C.int {
	*length = C.size_t(len(b))
	if len(b) > int(min(capacity, math.MaxInt)) {
		setText(f, "the buffer is too small: length says what it takes")
		return C.SLUICE_ERR_SPACE
	}
	if len(b) > 0 {
		copy(unsafe.Slice((*byte)(unsafe.Pointer(buffer)), len(b)), b)
	}
	return C.SLUICE_OK
}

// setAddress tells the caller where memory lies.
func setAddress(p *C.uint64_t, mem []byte) {
	*p = C.uint64_t(uintptr(unsafe.Pointer(unsafe.SliceData(mem))))
}

// stringList is a list of strings that ends with NULL.
func stringList(p **C.char) (list []string) {
	for p != nil && *p != nil {
		list = append(list, C.GoString(*p))
		p = (**C.char)(unsafe.Add(unsafe.Pointer(p), unsafe.Sizeof(*p)))
	}
	return list
}

// hostSegment is memory of the program's, which stays where it is.
func hostSegment(s *C.struct_sluice_segment) (driver.Segment, error) {
	mem, err := inPlace[byte]((*byte)(s.host), uint64(s.length), "sluice_segment.host")
	if err == nil && len(mem) == 0 {
		err = argument("sluice_segment.length is 0")
	}
	return engine.HostSegment(mem), err
}
