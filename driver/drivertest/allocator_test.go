// SPDX-License-Identifier: Apache-2.0

package drivertest

import (
	"context"
	"errors"
	"io"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/sluicehq/sluice/backends/mem"
	"github.com/sluicehq/sluice/backends/shm"
	"github.com/sluicehq/sluice/driver"
)

// landlord is a good backend with memory of its own, which is foreign to others.
type landlord struct {
	driver.Backend
	habits
	ended  atomic.Bool
	mu     sync.Mutex
	leased [][]byte
	spare  []byte // given back, to be let again
}

// habits say where a landlord departs from the good one. What is nil stays good.
type habits struct {
	alloc func(l *landlord, n uint64) (driver.Segment, io.Closer, error)
	evict func(l *landlord) // called by Close
}

func (l *landlord) Alloc(n uint64) (driver.Segment, io.Closer, error) {
	if l.alloc != nil {
		return l.alloc(l, n)
	}
	return l.good(n)
}

func (l *landlord) good(n uint64) (driver.Segment, io.Closer, error) {
	if l.ended.Load() {
		return driver.Segment{}, nil, driver.ErrClosed
	}
	return l.let(n)
}

func (l *landlord) let(n uint64) (driver.Segment, io.Closer, error) {
	if n == 0 || n > 1<<47 {
		return driver.Segment{}, nil, driver.ErrBounds
	}
	space, err := ForeignMemory(n)
	if err != nil {
		return driver.Segment{}, nil, err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.leased = append(l.leased, space.Segment.Mem)
	return space.Segment, closer(sync.OnceValue(func() error {
		l.mu.Lock()
		defer l.mu.Unlock()
		l.leased = slices.DeleteFunc(l.leased, func(mem []byte) bool {
			return &mem[0] == &space.Segment.Mem[0]
		})
		return space.Free()
	})), nil
}

func (l *landlord) Close() error {
	l.ended.Store(true)
	if l.evict != nil {
		l.evict(l)
	}
	return l.Backend.Close()
}

type closer func() error

func (f closer) Close() error { return f() }

// landlordOf makes a harness of a backend with memory of its own.
func landlordOf(name string, open func() (driver.Backend, error), how habits) Harness {
	return Harness{Name: name, OwnMemory: true, New: func() (driver.Backend, error) {
		b, err := open()
		if err != nil {
			return nil, err
		}
		return &landlord{Backend: b, habits: how}, nil
	}}
}

func openMem() (driver.Backend, error) { return mem.New(mem.Config{}) }
func openShm() (driver.Backend, error) { return shm.New(shm.Config{}) }

var landlordHarness = landlordOf("landlord", openShm, habits{})

// TestOwnMemory is with memory of the backend itself, in this process and the second one.
func TestOwnMemory(t *testing.T) { overOwnMemory(t, Owned...) }

func TestSoakOwnMemory(t *testing.T) { overOwnMemory(t) }

func overOwnMemory(t *testing.T, only ...string) {
	h := landlordOf("landlord-mem", openMem, habits{})
	h.Guards, h.Only = true, only
	Run(t, h)
	h = landlordHarness
	h.Wirings, h.Only = Processes, only
	Run(t, h)
}

func BenchmarkOwnMemory(b *testing.B) { Benchmark(b, landlordHarness) }

func TestOwnMemoryIsTheBackends(t *testing.T) {
	h := landlordHarness.withDefaults()
	for _, w := range []Wiring{Pair, Processes} {
		t.Run(w.String(), func(t *testing.T) { // its goroutines are over before the next
			s := newStage(t, h, w)
			l, r := s.local(4096), s.remote(4096)
			let := s.near.b.(*landlord).leased
			if len(let) != 1 || &let[0][0] != &s.near.region(l.id).seg.Mem[0] {
				t.Error("local memory is not the backend's")
			}
			if far, ok := s.far.party.(*host); ok && len(far.b.(*landlord).leased) != 1 {
				t.Error("remote memory is not the backend's")
			}
			r.expect("memory of the far side's backend")
		})
	}
	s := newStage(t, memHarness.withDefaults(), Self)
	if _, err := s.home.try(request{Do: "add", Len: 1, Own: true}); err == nil {
		t.Error("a backend without memory of its own gave some")
	}
	if hasMemory(s.near.b) {
		t.Error("mem has no memory of its own")
	}
	none := landlordOf("none", openMem, habits{alloc: func(*landlord, uint64) (driver.Segment,
		io.Closer, error) {
		return driver.Segment{}, nil, driver.ErrNotSupported
	}})
	none.OwnMemory = false
	if hasMemory(newStage(t, none.withDefaults(), Self).near.b) {
		t.Error("checks would run although the backend says that it has no memory of its own")
	}
}

// altered changes what the good one gives.
func altered(f func(seg *driver.Segment)) habits {
	return habits{alloc: func(l *landlord, n uint64) (driver.Segment, io.Closer, error) {
		seg, owner, err := l.good(n)
		if err == nil {
			f(&seg)
		}
		return seg, owner, err
	}}
}

// closing changes how memory is given back.
func closing(f func(l *landlord, mem []byte, owner io.Closer) error) habits {
	return habits{alloc: func(l *landlord, n uint64) (driver.Segment, io.Closer, error) {
		seg, owner, err := l.good(n)
		if err != nil {
			return seg, owner, err
		}
		return seg, closer(func() error { return f(l, seg.Mem, owner) }), nil
	}}
}

// letAgain lets one range again and again, cleaned, without a look at who may
// still write to it.
func letAgain(l *landlord, n uint64) (driver.Segment, io.Closer, error) {
	l.mu.Lock()
	mem := l.spare
	l.spare = nil
	l.mu.Unlock()
	if uint64(len(mem)) < n {
		seg, _, err := l.good(max(n, 4096))
		if err != nil || n == 0 {
			return driver.Segment{}, nil, errors.Join(err, driver.ErrBounds)
		}
		mem = seg.Mem
	}
	clear(mem)
	return driver.Segment{Kind: driver.DRAM, Len: n, Mem: mem[:n]}, closer(func() error {
		l.mu.Lock()
		defer l.mu.Unlock()
		l.spare = mem
		return nil
	}), nil
}

// unproven is shm that ends a registration without a proof.
func unproven() (driver.Backend, error) {
	b, err := shm.New(shm.Config{})
	if err != nil {
		return nil, err
	}
	return sabotageOf(b, sabotage{
		register: func(b *saboteur, seg driver.Segment) (driver.Memory, error) {
			m, err := b.Backend.Register(seg)
			return stays{m}, err
		},
		fence: func(*saboteur, context.Context, uint32) error { return nil },
	}), nil
}

// stays is a registration that does not end.
type stays struct{ driver.Memory }

func (stays) Close() error { return nil }

// slumlords breach the contract of Alloc.
var slumlords = []struct {
	name  string
	check string
	open  func() (driver.Backend, error)
	how   habits
}{
	{"gives memory that is not zero", "AllocatorFresh", openMem, altered(func(seg *driver.Segment) {
		seg.Mem[len(seg.Mem)-1] = 1
	})},
	{"gives memory off a page", "AllocatorFresh", openMem,
		habits{alloc: func(l *landlord, n uint64) (driver.Segment, io.Closer, error) {
			seg, owner, err := l.good(n + 64)
			if err == nil {
				seg, err = seg.Slice(64, n, [16]byte{})
			}
			return seg, owner, err
		}}},
	{"gives memory of the Go heap", "AllocatorFresh", openMem, altered(func(seg *driver.Segment) {
		page := os.Getpagesize()
		mem := make([]byte, len(seg.Mem)+page)
		seg.Mem = mem[page-int(addressOf(mem))%page:][:len(seg.Mem)]
	})},
	{"draws a secret", "AllocatorFresh", openMem, altered(func(seg *driver.Segment) {
		seg.Secret[3] = 1
	})},
	{"gives memory that peers cannot write", "AllocatorFresh", openMem,
		altered(func(seg *driver.Segment) {
			seg.ReadOnly = true
		})},
	{"gives a byte less", "AllocatorFresh", openMem,
		habits{alloc: func(l *landlord, n uint64) (driver.Segment, io.Closer, error) {
			return l.good(max(n-1, 1))
		}}},
	{"gives the same memory twice", "AllocatorFresh", openMem,
		habits{alloc: func(l *landlord, n uint64) (driver.Segment, io.Closer, error) {
			seg, owner, err := l.good(32 << 20)
			if len(l.leased) > 1 {
				seg.Mem = l.leased[0]
			}
			clear(seg.Mem[:n])
			seg.Mem, seg.Len = seg.Mem[:n], n
			return seg, owner, err
		}}},
	{"does not say what is wrong with a size", "AllocatorBounds", openMem,
		habits{alloc: func(l *landlord, n uint64) (driver.Segment, io.Closer, error) {
			seg, owner, err := l.good(n)
			if errors.Is(err, driver.ErrBounds) {
				err = io.ErrUnexpectedEOF
			}
			return seg, owner, err
		}}},
	{"gives a page for nothing", "AllocatorBounds", openMem,
		habits{alloc: func(l *landlord, n uint64) (driver.Segment, io.Closer, error) {
			return l.good(max(n, 1))
		}}},
	{"minds a second Close", "AllocatorCloseTwice", openMem,
		habits{alloc: func(l *landlord, n uint64) (driver.Segment, io.Closer, error) {
			seg, owner, err := l.good(n)
			closed := false
			return seg, closer(func() error {
				if closed {
					return os.ErrClosed
				}
				closed = true
				return owner.Close()
			}), err
		}}},
	{"keeps what was given back", "AllocatorLeak", openMem,
		closing(func(_ *landlord, _ []byte, owner io.Closer) error {
			litter.drop(owner)
			return nil
		})},
	{"takes its memory along", "AllocatorOutlives", openMem, habits{evict: func(l *landlord) {
		for _, mem := range l.leased {
			clear(mem)
		}
	}}},
	{"allocates after its end", "AllocatorOutlives", openMem, habits{alloc: (*landlord).let}},
	{"lets memory again that is written to", "AllocatorReuse", unproven, habits{alloc: letAgain}},
}

// TestSlumlords proves that the checks of Alloc can fail.
func TestSlumlords(t *testing.T) {
	if raceEnabled {
		t.Log("not run with the race detector, which notices first")
		return
	}
	for _, m := range slumlords {
		t.Run(m.name, func(t *testing.T) {
			h := landlordOf("slumlord", m.open, m.how)
			h.Limit = 500 * time.Millisecond
			notices(t, find(t, m.check), h, Self)
		})
	}
	t.Run("waits for a frozen peer", func(t *testing.T) {
		h := landlordOf(landlordHarness.Name, openShm,
			closing(func(_ *landlord, _ []byte, owner io.Closer) error {
				time.Sleep(4 * time.Second) // dawdle is of no use to the second process
				return owner.Close()
			}))
		h.Limit = 700 * time.Millisecond
		notices(t, find(t, "AllocatorFrozen"), h, Processes)
	})
}
