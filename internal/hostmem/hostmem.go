// SPDX-License-Identifier: Apache-2.0

// Package hostmem allocates page-aligned memory outside the Go heap that other
// processes can map.
//
// A Buffer is backed by memfds: a peer that receives their descriptors maps the same pages. The
// garbage collector neither sees nor moves the memory, and the program must Close it. A Buffer has
// no finalizer, on purpose: slices of Bytes do not keep it alive, so a finalizer would unmap
// memory that is still in use.
//
// A revoke can replace pages to which a stopped peer may still write (Renew). Therefore the bytes
// of a Buffer may lie in several memfds, the layers (layer.go): a piece is a range of the Buffer
// whose bytes are in one of them. Renew copies a range into another layer and maps that at the same
// address (renew.go). Writes of this process call Enter and Leave, so that no page moves under
// them.
//
// The package also has what backends need for memory that others can unmap or write:
//
//	MapSealed    maps a memfd of another process, which may be hostile
//	CatchFault   turns a fault of registered memory into an error
//	DupDMABuf    duplicates a descriptor of device memory
//	AddLent      records device memory that other processes have mapped
package hostmem

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"sync"

	"github.com/sluicehq/sluice/driver"
)

// HugePolicy says which pages to ask for.
type HugePolicy uint8

// The policies.
const (
	// reserved huge pages when all of it fits and little is wasted, else transparent ones
	HugeAuto HugePolicy = iota
	HugeNone            // base pages
)

// wasteMax is the part of an allocation, as 1/wasteMax of it, that HugeAuto may
// lose by rounding up: reserved pages are scarce, and no other program can use them.
const wasteMax = 8

// Options describe an allocation; the zero value is useful.
type Options struct {
	Purpose  string     // counted by InUse under this name; "" is "unnamed"
	Node     int        // take pages of NUMA node Node-1 only; 0: of any
	Huge     HugePolicy // which pages
	Populate bool       // fault all pages in now, and collapse them to huge pages where possible
}

// Alloc allocates n zeroed bytes at an address that is a multiple of 2 MiB. It allocates whole
// pages, but Bytes has exactly n bytes. A size that this machine cannot serve is driver.ErrBounds,
// a node that it does not have is a *driver.UnavailableError. Without Populate the kernel allocates
// each page at first touch, and kills a process if it has none; with Populate a lack of memory is
// driver.ErrBounds here.
func Alloc(n uint64, o Options) (*Buffer, error) {
	// Refuse a size that cannot be served: the kernel would accept it here and kill a process
	// later.
	switch total, _ := memoryLimits("/"); {
	case n == 0:
		return nil, sizeError(n, 0, "nothing was asked for: ask for at least 1 byte")
	case n > addressMax:
		return nil, sizeError(n, addressMax, "it does not fit in the address space: check the "+
			"computation of the size")
	case total != 0 && n > total:
		return nil, sizeError(n, total, "it is more than the machine or its cgroup has: ask for "+
			"less, or raise memory.max")
	}
	need := roundUp(n, HugeSize) / HugeSize
	if o.Huge == HugeAuto && freeHugePages("/") >= need && need*HugeSize-n <= n/wasteMax {
		if b, err := alloc(n, o, true); err == nil {
			return b, nil
		} // Another process took the pages, or we may not use MFD_HUGETLB: use base pages.
	}
	return alloc(n, o, false)
}

// alloc makes the first layer and maps it over a reserved range.
func alloc(n uint64, o Options, huge bool) (_ *Buffer, err error) {
	b := &Buffer{opts: o, len: n, page: basePage, renewing: make(chan struct{}, 1)}
	if huge {
		b.page = HugeSize
	}
	size := roundUp(n, b.page)
	if o.Populate && !huge {
		if _, available := memoryLimits("/"); available != 0 && size > available {
			return nil, tooLittle(size, available)
		}
	}
	l, err := newLayer(o.Purpose, size, huge)
	if err != nil {
		return nil, err
	}
	if b.mem, err = Reserve(size, HugeSize); err != nil {
		return nil, errors.Join(err, l.close())
	}
	l.used.add(0, size)
	b.layers = []*layer{l}
	b.pieces = []piece{{off: 0, len: size, layer: l}}
	if err := b.mapFirstLayer(l); err != nil {
		return nil, errors.Join(err, Unmap(b.mem), l.close())
	}
	addUsage(o.Purpose, int64(size))
	return b, nil
}

// mapFirstLayer maps the first layer over the reserved range.
func (b *Buffer) mapFirstLayer(l *layer) error {
	if err := Place(b.mem, l.fd, 0); err != nil {
		return mapError(err, uint64(len(b.mem)))
	}
	if err := bind(b.mem, b.opts.Node); err != nil {
		return err
	}
	b.advise(b.mem)
	if !b.opts.Populate {
		return nil
	}
	collapsed, err := populate(b.mem, l, 0, b.collapses(l))
	b.collapsed = collapsed
	return err
}

// Buffer is one allocation. All methods may be called by any goroutine; the
// bytes follow the rules of any Go memory.
type Buffer struct {
	landings // counts writes of this process, on which Renew waits
	renewals // the callbacks of OnRenew

	opts      Options
	len       uint64        // bytes asked for
	page      uint64        // page size, in which Renew replaces memory: 2 MiB if hugetlb
	collapsed bool          // Alloc has collapsed every whole 2 MiB to a huge page
	renewing  chan struct{} // a lock that a context can interrupt: one Renew at a time; before mu

	mu     sync.RWMutex // guards what follows; before renewals.mu
	mem    []byte       // whole pages; nil after Close
	layers []*layer     // open memfds, each used by at least one piece
	pieces []piece      // by offset, without gaps; neighbours are of different layers
	holds  int          // calls of Hold that are not released; Renew is refused while there are any
}

// Bytes returns the memory, or nil after Close. Renew does not change the address. The program must
// not use the slice after Close: an access to unmapped memory ends the process.
func (b *Buffer) Bytes() []byte {
	b.mu.RLock()
	defer b.mu.RUnlock()
	if b.mem == nil {
		return nil
	}
	return b.mem[:b.len:b.len]
}

// Segment describes the whole Buffer for registration. Its Secret is left to the
// engine.
func (b *Buffer) Segment() driver.Segment {
	mem := b.Bytes()
	return driver.Segment{Kind: driver.DRAM, Len: uint64(len(mem)), Mem: mem, Shared: b}
}

// PageSize returns the page size in bytes. It is 2 MiB if Alloc got reserved huge pages, or if
// Populate collapsed every whole 2 MiB of the memory to a transparent huge page.
func (b *Buffer) PageSize() uint64 {
	if b.collapsed {
		return HugeSize
	}
	return b.page
}

// Close unmaps the memory and closes its descriptors. Peers that have mapped it keep their pages
// until they unmap them. If the kernel refuses to unmap it, Close changes nothing and may be called
// again. A second Close after a successful one does nothing.
func (b *Buffer) Close() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.mem == nil {
		return nil
	}
	if err := Unmap(b.mem); err != nil {
		return fmt.Errorf("close memory: %w", err)
	}
	addUsage(b.opts.Purpose, -int64(len(b.mem)))
	var err error
	for _, l := range b.layers {
		err = errors.Join(err, l.close())
	}
	b.mem, b.layers, b.pieces = nil, nil, nil
	return err
}

// HugeSize is the size of a huge page: one entry of the page tables of amd64, and of arm64 with
// 4 KiB pages. Every Buffer is aligned to it.
const HugeSize = 2 << 20

// addressMax bounds a size, so that it and its alignment fit in 47 bits of address space.
const addressMax = 1 << 46

var basePage = uint64(os.Getpagesize())

// sizeError returns a driver.ErrBounds; have is 0 if it is not known.
func sizeError(want, have uint64, reason string) error {
	return fmt.Errorf("allocate %d bytes (have %d): %s: %w", want, have, reason, driver.ErrBounds)
}

func tooLittle(want, have uint64) error {
	return sizeError(want, have, "too little memory is free: ask for less, or end what uses it")
}

func roundUp(n, unit uint64) uint64 { return (n + unit - 1) / unit * unit }

func roundDown(n, unit uint64) uint64 { return n / unit * unit }

// usage has the allocated bytes of the process by purpose.
var usage = struct {
	sync.Mutex
	bytes map[string]uint64
}{bytes: map[string]uint64{}}

// InUse returns the bytes that are allocated now, in whole pages, by purpose. The caller may change
// the map.
func InUse() map[string]uint64 {
	usage.Lock()
	defer usage.Unlock()
	return maps.Clone(usage.bytes)
}

func addUsage(purpose string, delta int64) {
	usage.Lock()
	defer usage.Unlock()
	name := purposeName(purpose)
	usage.bytes[name] += uint64(delta)
	if usage.bytes[name] == 0 {
		delete(usage.bytes, name)
	}
}

func purposeName(purpose string) string {
	if purpose == "" {
		return "unnamed"
	}
	return purpose
}
