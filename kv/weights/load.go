// SPDX-License-Identifier: Apache-2.0

package weights

import (
	"context"
	"fmt"
	"io"
	"iter"
	"sync"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/engine"
)

// Config says how tensors are read. Its zero values mean the defaults.
type Config struct {
	// Memory is where Load puts the tensors. It belongs to the caller, who may have registered or
	// pinned it; Load uses it until Load.Close has returned. It must have room for the largest
	// tensor. The more it has, the further reading runs ahead.
	Memory []byte
	// Names are the tensors to load, in the order in which they are needed; nil: all, in the order
	// of files. Tensors that are adjacent in a file and in Names are read together.
	Names []string
	// Piece is the most bytes of one read; 0: 8 MiB.
	Piece int
	// Readers is how many reads are under way at a time; 0: 4.
	Readers int
	// Straight gives tensors the same offset within a page of Memory as in their file. A File can
	// then read them with O_DIRECT, past the page cache. Memory must begin at a page boundary, and
	// each run of adjacent tensors takes up to a page more of it: see Model.MemoryFor.
	Straight bool
}

// Bounds of a Config.
const (
	pieceDefault   = 8 << 20 // 8 MiB: long enough for any disk to stream
	pieceMax       = 1 << 30
	readersDefault = 4
	readersMax     = 256
)

// EnsureDefaults fills in what is zero.
func (c *Config) EnsureDefaults() {
	if c.Piece == 0 {
		c.Piece = pieceDefault
	}
	if c.Readers == 0 {
		c.Readers = readersDefault
	}
}

func (c *Config) check() error {
	if c.Piece < 1 || c.Piece > pieceMax {
		return fmt.Errorf("load weights: config: Piece is %d, want 1 to %d: %w", c.Piece, pieceMax,
			engine.ErrBounds)
	}
	if c.Readers < 1 || c.Readers > readersMax {
		return fmt.Errorf("load weights: config: Readers is %d, want 1 to %d: %w", c.Readers,
			readersMax, engine.ErrBounds)
	}
	return nil
}

// Loaded is a tensor whose bytes are in memory.
type Loaded struct {
	Tensor
	Bytes []byte // within Config.Memory; the caller's until Release
}

// Load is the reading of a model's tensors. All methods may be called by any goroutine.
type Load struct {
	cfg    Config
	source []Source
	byName map[string]int
	ended  sync.WaitGroup // readers
	unhook func() bool    // from the context

	mu      sync.Mutex
	room    sync.Cond     // readers wait for memory; with mu
	news    chan struct{} // closed and replaced when a tensor has arrived or the Load has ended
	items   []item        // in the order of need
	ring    ring
	next    int   // the first item of which readers have not claimed all bytes
	done    int64 // bytes of it that readers have claimed
	last    int   // the last item before next that is not empty; -1: none
	arrived []int // items that have arrived and that Next has not returned
	handed  int   // how many items Next has returned or skipped
	err     error // why reading has stopped
}

// Load starts to read tensors in the background, and returns at once. Reading ends when all tensors
// are read, when ctx ends, at the first error, or with Close. The caller must always call Close.
func (m *Model) Load(ctx context.Context, cfg Config) (*Load, error) {
	cfg.EnsureDefaults()
	if err := cfg.check(); err != nil {
		return nil, err
	}
	chosen, err := m.choose(cfg.Names)
	if err != nil {
		return nil, err
	}
	l := &Load{cfg: cfg, source: m.sources, byName: make(map[string]int, len(chosen)),
		items: make([]item, len(chosen)), news: make(chan struct{})}
	l.room.L = &l.mu
	l.ring.memory, l.ring.straight, l.last = cfg.Memory, cfg.Straight, -1
	for i, t := range chosen {
		if t.Len > int64(len(cfg.Memory)) {
			return nil, fmt.Errorf("load weights: tensor %q has %d bytes, Config.Memory %d: %w",
				t.Name, t.Len, len(cfg.Memory), engine.ErrBounds)
		}
		l.items[i] = item{Tensor: t, left: t.Len}
		l.byName[t.Name] = i
	}
	for range cfg.Readers {
		l.ended.Go(l.read)
	}
	l.unhook = context.AfterFunc(ctx, func() { l.end(driver.ContextError(ctx)) })
	return l, nil
}

// Next returns each tensor once, in the order of arrival. After the last it returns io.EOF. It also
// returns tensors that Wait has returned, unless they were released since.
func (l *Load) Next(ctx context.Context) (t Loaded, err error) {
	err = l.until(ctx, func() (bool, error) {
		for len(l.arrived) > 0 && l.items[l.arrived[0]].state == released {
			l.arrived = l.arrived[1:] // Wait returned it
			l.handed++
		}
		if len(l.arrived) > 0 {
			t = l.items[l.arrived[0]].loaded()
			l.arrived = l.arrived[1:]
			l.handed++
			return true, nil
		}
		if l.handed == len(l.items) {
			return false, io.EOF
		}
		return false, l.err
	})
	return t, err
}

// All iterates over Next, and ends with the first error.
func (l *Load) All(ctx context.Context) iter.Seq2[Loaded, error] {
	return func(yield func(Loaded, error) bool) {
		for {
			t, err := l.Next(ctx)
			if err == io.EOF || !yield(t, err) || err != nil {
				return
			}
		}
	}
}

// Wait returns one tensor when it has arrived. Wait does not change the order of reading: if the
// tensors before it fill the memory and are never released, it never arrives, and Wait returns when
// ctx ends.
func (l *Load) Wait(ctx context.Context, name string) (t Loaded, err error) {
	i, ok := l.byName[name]
	if !ok {
		return t, fmt.Errorf("wait for tensor %q, which is not being read: %w", name,
			engine.ErrBounds)
	}
	err = l.until(ctx, func() (bool, error) {
		switch it := &l.items[i]; it.state {
		case ready:
			t = it.loaded()
			return true, nil
		case released:
			return false, fmt.Errorf("wait for tensor %q, which was released: %w", name,
				engine.ErrClosed)
		}
		return false, l.err
	})
	return t, err
}

// until calls try at once and after each arrival, until try succeeds or fails, or ctx ends.
func (l *Load) until(ctx context.Context, try func() (bool, error)) error {
	for {
		l.mu.Lock()
		ok, err := try()
		news := l.news
		l.mu.Unlock()
		if ok || err != nil {
			return err
		}
		select {
		case <-news:
		case <-ctx.Done():
			return fmt.Errorf("wait for weights, with %d tensors in memory that were not "+
				"released: %w", l.held(), driver.ContextError(ctx))
		}
	}
}

func (l *Load) held() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.ring.held(l.items)
}

// Release lets Load use the memory of a tensor for others. It is an error to release a tensor that
// has not arrived, or to release it twice.
func (l *Load) Release(name string) error {
	i, ok := l.byName[name]
	l.mu.Lock()
	defer l.mu.Unlock()
	if !ok || l.items[i].state != ready {
		return fmt.Errorf("release tensor %q, which is not there: %w", name, engine.ErrBounds)
	}
	l.items[i].state = released
	l.ring.release(l.items)
	l.room.Broadcast()
	return nil
}

// Close stops reading and waits for the reads in flight: afterwards no byte of Config.Memory
// changes. Tensors that were returned keep their bytes.
func (l *Load) Close() error {
	l.end(fmt.Errorf("load weights: %w", engine.ErrClosed))
	l.unhook()
	l.ended.Wait()
	return nil
}

// end stops all readers, once.
func (l *Load) end(err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.err == nil {
		l.err = err
		l.wakeWaiters()
		l.room.Broadcast()
	}
}

// wakeWaiters wakes the goroutines that wait for tensors. Preconditions: l.mu is held.
func (l *Load) wakeWaiters() {
	close(l.news)
	l.news = make(chan struct{})
}
