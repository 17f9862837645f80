// SPDX-License-Identifier: Apache-2.0

package cuda

import (
	"errors"
	"fmt"
	"slices"
	"sync"

	gpu "github.com/sluicehq/sluice/csrc/cuda"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/hostmem"
)

// DeviceOptions choose a card; the zero value is the first one.
type DeviceOptions struct {
	Library string // a path of libcuda; "" is the system's libcuda.so.1
	Ordinal int    // of the card, as CUDA counts
}

// Device is a card with the gather kernels loaded, on a stream of its own. All methods may be
// called by any goroutine; Moves go one after the other.
type Device struct {
	d    *gpu.Device
	card Card

	mu sync.Mutex // held by a Move, and by a call that takes memory away; guards what follows
	// tally is a page of pinned memory, to which kernels add across the bus what they leave out.
	// That is mostly nothing, so this is faster than to copy it back. nil: the Device is closed.
	tally   *hostmem.Buffer
	tallyAt uint64 // by which address the card reaches tally
	failed  bool   // the last launch has failed: its kernel may run still
}

const tallyPage = 4096

// OpenDevice opens libcuda and a card, and has the driver compile the kernels. If something is
// missing or too old, the error is a *driver.UnavailableError.
func OpenDevice(o DeviceOptions) (*Device, error) {
	if err := gpu.Load(o.Library); err != nil {
		return nil, err
	}
	card, err := gpu.Open(o.Ordinal)
	if err != nil {
		return nil, err
	}
	f := card.Facts()
	d := &Device{d: card, card: Card{f.Compute, f.Driver, f.SMs, f.Shared}}
	err = d.card.check(&moves)
	if err == nil {
		err = card.Load(moves.PTX, moves.Kernels)
	}
	if err == nil {
		d.tally, err = hostmem.Alloc(tallyPage, hostmem.Options{Purpose: "cuda-tally",
			Populate: true})
	}
	if err == nil {
		d.tallyAt, err = card.Pin(d.tally.Bytes())
	}
	if err != nil {
		_ = d.Close()
		return nil, fmt.Errorf("open device %d, %s: %w", o.Ordinal, f.Name, err)
	}
	return d, nil
}

// Name returns the name of the card, and its place on the bus.
func (d *Device) Name() string {
	f := d.d.Facts()
	return f.Name + " at " + f.Bus
}

// Close waits for the Run under way and closes the card. Close its Memory before. It is idempotent.
func (d *Device) Close() (err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.tallyAt != 0 {
		err = d.d.Unpin(d.tally.Bytes())
	}
	if d.tally != nil {
		err = errors.Join(err, d.tally.Close())
	}
	d.tally, d.tallyAt = nil, 0
	return errors.Join(err, d.d.Close())
}

// Memory is memory that the kernels of one Device reach: of the card, or pinned memory of the host.
// All methods may be called by any goroutine.
type Memory struct {
	dev  *Device
	host []byte // nil: memory of the card
	n    uint64
	at   uint64 // 0: closed; guarded by dev.mu
}

// Alloc returns n bytes of the card's memory, not zeroed.
func (d *Device) Alloc(n uint64) (*Memory, error) {
	at, err := d.d.Alloc(n)
	if err != nil {
		return nil, err
	}
	return &Memory{dev: d, at: at, n: n}, nil
}

// Pin makes host memory reachable by kernels. It must lie outside the Go heap, as that of
// hostmem does, and stay until Close.
func (d *Device) Pin(mem []byte) (*Memory, error) {
	at, err := d.d.Pin(mem)
	if err != nil {
		return nil, err
	}
	return &Memory{dev: d, host: mem, at: at, n: uint64(len(mem))}, nil
}

// Close waits for the Run under way, and frees memory of the card, or unpins memory of the host. It
// is idempotent. Later Runs with the memory return driver.ErrClosed.
func (m *Memory) Close() error {
	m.dev.mu.Lock()
	defer m.dev.mu.Unlock()
	at := m.at
	m.at = 0
	switch {
	case at == 0:
		return nil
	case m.host != nil:
		return m.dev.d.Unpin(m.host)
	}
	return m.dev.d.Free(at)
}

// WriteAt copies b to the memory and waits for the end.
func (m *Memory) WriteAt(b []byte, off uint64) error {
	m.dev.mu.Lock()
	defer m.dev.mu.Unlock()
	at, err := m.span(off, uint64(len(b)))
	if err != nil || len(b) == 0 {
		return err
	}
	return m.dev.d.Write(at, b)
}

// ReadAt copies from the memory to b and waits for the end.
func (m *Memory) ReadAt(b []byte, off uint64) error {
	m.dev.mu.Lock()
	defer m.dev.mu.Unlock()
	at, err := m.span(off, uint64(len(b)))
	if err != nil || len(b) == 0 {
		return err
	}
	return m.dev.d.Read(b, at)
}

// span returns the address of a range.
// Preconditions: dev.mu is held.
func (m *Memory) span(off, n uint64) (uint64, error) {
	switch {
	case m.at == 0:
		return 0, driver.ErrClosed
	case off > m.n || n > m.n-off:
		return 0, driver.ErrBounds
	}
	return m.at + off, nil
}

// Span is a range of a Memory.
type Span struct {
	Memory *Memory
	Off, N uint64 // bytes
}

// Move says which entries move where: for each i below Count, the entry at place Src[i] of
// each part's source goes to place Dst[i] of its destination. A list of Src makes it a
// gather, one of Dst a scatter. The memories must not overlap, and the sources and lists must
// not change meanwhile; if a place of the destination is named twice, it ends with bytes of
// either entry.
type Move struct {
	Parts    []Part // 1 to PartsMax
	Count    int    // entries
	Dst, Src Index
}

// Part is one array of entries on each side.
type Part struct {
	Dst, Src Span
	Entry    uint64 // bytes
	// bytes from one place to the next, at least Entry; 0: Entry, one behind the other
	DstStride, SrcStride uint64
}

// Index is a list of places; without memory, entry i is at place i.
type Index struct {
	List Span
	Wide bool // 64 bits an index, not 32
}

// Run moves entries within the budget, waits for the end, and says how the kernel was launched.
// kernel is KernelAsync or KernelRows; "" takes the one that is expected to be faster. Entries with
// a bad index are left out and counted, all others moved: then the error is driver.ErrBounds. A
// *LayoutError says that nothing was moved. Run allocates nothing unless it fails.
func (d *Device) Run(m *Move, b Budget, kernel string) (Tally, Launch, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	var a args
	if err := m.fill(&a, d); err != nil {
		return Tally{}, Launch{}, err
	}
	l, err := a.plan(&d.card, b, kernel)
	if err != nil {
		return Tally{}, Launch{}, err
	}
	if d.tally == nil {
		return Tally{}, l, driver.ErrClosed
	}
	if d.failed { // its kernel may still add to tally
		if err := d.d.Sync(); err != nil {
			return Tally{}, l, err
		}
	}
	a.tally = d.tallyAt
	copy(d.tally.Bytes(), clean.bytes())
	launch := gpu.Launch{Kernel: slices.Index(moves.Kernels, l.Kernel), Blocks: l.Blocks,
		Threads: l.Threads, Shared: l.Shared, Args: a.bytes()}
	err = d.d.Launch(&launch, nil)
	if d.failed = err != nil; d.failed {
		return Tally{}, l, err
	}
	var t tally
	copy(t.bytes(), d.tally.Bytes())
	sum, err := t.sum(a.count)
	return sum, l, err
}

func (m *Move) fill(a *args, d *Device) error {
	if err := a.begin(len(m.Parts), m.Count); err != nil {
		return err
	}
	for k := range m.Parts {
		p := &m.Parts[k]
		dst, err := p.Dst.side(d, p.DstStride)
		if err != nil {
			return fmt.Errorf("part %d, destination: %w", k, err)
		}
		src, err := p.Src.side(d, p.SrcStride)
		if err != nil {
			return fmt.Errorf("part %d, source: %w", k, err)
		}
		if err := a.fill(k, p.Entry, dst, src); err != nil {
			return err
		}
		if p.Dst.Memory.host != nil && p.Src.Memory.host == nil {
			a.flags |= farDst
		}
	}
	var err error
	if a.dstIndex, err = m.Dst.fill(a, d, dstWide, &a.dstPlaces, "destination"); err != nil {
		return err
	}
	a.srcIndex, err = m.Src.fill(a, d, srcWide, &a.srcPlaces, "source")
	return err
}

func (s *Span) side(d *Device, stride uint64) (side, error) {
	if s.Memory == nil || s.Memory.dev != d {
		return side{}, fmt.Errorf("memory of another device: %w", driver.ErrBounds)
	}
	at, err := s.Memory.span(s.Off, s.N)
	return side{at, s.N, stride}, err
}

func (x *Index) fill(a *args, d *Device, wide uint32, places *uint64, end string) (uint64,
	error) {
	if x.List.Memory == nil {
		return 0, nil
	}
	s, err := x.List.side(d, 0)
	if err != nil {
		return 0, fmt.Errorf("indices of the %s: %w", end, err)
	}
	size := uint64(4)
	if x.Wide {
		size = 8
		a.flags |= wide
	} else {
		*places = min(*places, Skip32)
	}
	if s.at%size != 0 {
		return 0, &LayoutError{-1, "indices of the " + end + " at an odd address",
			fmt.Sprintf("a multiple of %d", size)}
	}
	return s.at, a.covers(s.n/size, end)
}
