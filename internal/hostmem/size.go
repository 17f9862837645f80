// SPDX-License-Identifier: Apache-2.0

package hostmem

import (
	"fmt"
	"os"

	"github.com/sluicehq/sluice/driver"
)

// hugeSize is what the page tables of amd64 and of arm64 with 4 KiB pages map in
// one entry; every Buffer is aligned to it.
const hugeSize = 2 << 20

// addressMax leaves room in 47 bits of address space for the reservation.
const addressMax = 1 << 46

var basePage = uint64(os.Getpagesize())

// SizeError says that an allocation is too large, or empty, and what to do. It
// is a driver.ErrBounds.
type SizeError struct {
	Want, Have uint64 // bytes; Have is 0 where it is not known
	Reason     string // "the machine has too little memory"
	Fix        string // what to do next
}

// Error names the sizes, the reason and the remedy.
func (e *SizeError) Error() string {
	return fmt.Sprintf("allocate %d bytes: %s (have %d): %s", e.Want, e.Reason, e.Have, e.Fix)
}

// Is makes errors.Is(err, driver.ErrBounds) true.
func (e *SizeError) Is(target error) bool { return target == driver.ErrBounds }

// checkSize refuses what cannot end well, before anything is touched: the kernel
// would promise it and end some process later.
func checkSize(n uint64) error {
	if n == 0 {
		return &SizeError{Reason: "nothing was asked for", Fix: "ask for at least 1 byte"}
	}
	total, _ := memory("/")
	switch {
	case n > addressMax:
		return &SizeError{n, addressMax, "it does not fit in the address space",
			"check the computation of the size"}
	case total != 0 && n > total:
		return &SizeError{n, total, "it is more than the machine or its cgroup has",
			"ask for less, or raise memory.max"}
	}
	return nil
}

// checkFree refuses what the kernel would have to end some process for.
func checkFree(n uint64) error {
	if _, available := memory("/"); available != 0 && n > available {
		return tooLittle(n, available)
	}
	return nil
}

func tooLittle(want, have uint64) error {
	return &SizeError{want, have, "too little memory is free", "ask for less, or end what uses it"}
}

func roundUp(n, unit uint64) uint64 { return (n + unit - 1) / unit * unit }

func roundDown(n, unit uint64) uint64 { return n / unit * unit }
