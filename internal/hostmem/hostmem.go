// SPDX-License-Identifier: Apache-2.0

// Package hostmem allocates page-aligned memory outside the Go heap that other
// processes can map.
//
// It lies in memfds: a peer that receives the descriptors maps the same pages.
// The garbage collector neither sees nor moves it, and the program must Close
// it. There is no finalizer as a net, on purpose: slices of Bytes do not keep a
// Buffer alive, so a net would unmap memory that is still in use.
//
// Beside it stands what backends need for memory that is not theirs alone: pages of another
// process, which may be hostile (MapSealed), registered memory that is gone (CatchFault),
// descriptors of device memory (DupDMABuf), and which device memory other processes map (AddLent).
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
	Node     int        // number of a NUMA node plus one, of no other then; 0: any
	Huge     HugePolicy // which pages
	Populate bool       // fault everything in now, and gather it in huge pages where the kernel can
}

// Alloc returns n zeroed bytes at an address that is a multiple of 2 MiB. The
// memory is rounded up to whole pages; Bytes is not. A size that this machine
// cannot serve is driver.ErrBounds, a node that it does not have a
// *driver.UnavailableError. Without Populate the kernel finds the
// pages at first touch, and a lack of memory ends in its OOM killer; with it, a
// lack of memory is driver.ErrBounds here.
func Alloc(n uint64, o Options) (*Buffer, error) {
	// What cannot end well is refused before anything is touched: the kernel would promise it and
	// end some process later.
	switch total, _ := memory("/"); {
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
		} // The pages were taken meanwhile, or MFD_HUGETLB is not for us: go on without.
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
		if _, available := memory("/"); available != 0 && size > available {
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
	count(o.Purpose, int64(size))
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
	landings
	renewals

	opts      Options
	len       uint64        // bytes asked for
	page      uint64        // what layers change hands in: base pages, or 2 MiB if hugetlb
	collapsed bool          // all whole 2 MiB runs were gathered in huge pages at Alloc
	renewing  chan struct{} // has one place: one Renew at a time; before mu

	mu     sync.RWMutex // guards what follows; before renewals.mu
	mem    []byte       // whole pages; nil after Close
	layers []*layer     // open memfds, each used by at least one piece
	pieces []piece      // what lies where: ordered, without gaps, neighbours differ in layer
	holds  int          // of Hold: no Renew meanwhile
}

// Bytes returns the memory, nil after Close. The address stays the same through
// Renew. It must not be touched after Close: the process would die of it.
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

// PageSize returns the bytes of the pages that Alloc got: 2 MiB if reserved huge
// pages, or if Populate gathered every whole 2 MiB of it in transparent ones.
func (b *Buffer) PageSize() uint64 {
	if b.collapsed {
		return HugeSize
	}
	return b.page
}

// Close unmaps the memory and closes its descriptors. Peers that have mapped it
// keep their pages until they unmap them. Where the kernel refuses to unmap it, it stays as it is,
// and Close may be called again. It is idempotent.
func (b *Buffer) Close() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.mem == nil {
		return nil
	}
	if err := Unmap(b.mem); err != nil {
		return fmt.Errorf("close memory: %w", err)
	}
	count(b.opts.Purpose, -int64(len(b.mem)))
	var err error
	for _, l := range b.layers {
		err = errors.Join(err, l.close())
	}
	b.mem, b.layers, b.pieces = nil, nil, nil
	return err
}

// HugeSize is what the page tables of amd64 and of arm64 with 4 KiB pages map in
// one entry; every Buffer is aligned to it.
const HugeSize = 2 << 20

// addressMax leaves room in 47 bits of address space for the reservation.
const addressMax = 1 << 46

var basePage = uint64(os.Getpagesize())

// sizeError is driver.ErrBounds; have is 0 where it is not known.
func sizeError(want, have uint64, reason string) error {
	return fmt.Errorf("allocate %d bytes (have %d): %s: %w", want, have, reason, driver.ErrBounds)
}

func tooLittle(want, have uint64) error {
	return sizeError(want, have, "too little memory is free: ask for less, or end what uses it")
}

func roundUp(n, unit uint64) uint64 { return (n + unit - 1) / unit * unit }

func roundDown(n, unit uint64) uint64 { return n / unit * unit }

var usage = struct {
	sync.Mutex
	bytes map[string]uint64
}{bytes: map[string]uint64{}}

// InUse returns the bytes that are allocated now, in whole pages, by purpose. The map is the
// caller's.
func InUse() map[string]uint64 {
	usage.Lock()
	defer usage.Unlock()
	return maps.Clone(usage.bytes)
}

func count(purpose string, delta int64) {
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
