// SPDX-License-Identifier: Apache-2.0

package cuda

import (
	"fmt"
	"math"
	"sync"
	"sync/atomic"

	"github.com/sluicehq/sluice/driver"
)

// tally is struct sl_tally of gather.h.
type tally struct{ skipped, bad, firstBad uint64 }

// clean is a tally before a Move.
var clean = tally{firstBad: math.MaxUint64}

// Gather copies the entry at place from[i] of src to place i of dst, for every index of the
// list, one entry behind the other on both sides. It is Run for the plainest Move.
func Gather(dst, src []byte, entry uint64, from Index) (Tally, error) {
	parts := [1]Part{{Dst: dst, Src: src, Entry: entry}}
	m := Move{Parts: parts[:], Count: from.len(), Src: from}
	return Run(&m)
}

// Scatter copies the entry at place i of src to place to[i] of dst, as Gather does.
func Scatter(dst, src []byte, entry uint64, to Index) (Tally, error) {
	parts := [1]Part{{Dst: dst, Src: src, Entry: entry}}
	m := Move{Parts: parts[:], Count: to.len(), Dst: to}
	return Run(&m)
}

func (x *Index) len() int { return max(len(x.U32), len(x.U64)) }

// Run moves entries on the CPU, on the calling thread, as the kernels do on a card. Entries
// with a bad index are left out and counted, all others moved: then the error is
// driver.ErrBounds. A *LayoutError says that nothing was moved. Memory may lie at any address. Run
// allocates nothing unless it fails; parallel calls are allowed.
//
// A scatter over 128 MiB and more goes past the caches.
func Run(m *Move) (Tally, error) {
	var a args
	if err := m.fill(&a); err != nil {
		return Tally{}, err
	}
	t := clean
	if m.Count > 0 {
		move(m, &a, 0, a.count, &t)
	}
	return t.sum(a.count)
}

func (t *tally) sum(count uint64) (Tally, error) {
	sum := Tally{Moved: count - t.skipped - t.bad, Skipped: t.skipped, Bad: t.bad}
	if t.bad == 0 {
		return sum, nil
	}
	sum.FirstBad = t.firstBad
	return sum, driver.ErrBounds
}

// The threads of a Twin take entries by pieces: as few as are worth a word with the others,
// so that one that is held up holds up little.
const (
	pieceEntries = 128
	threadsMax   = 64
)

// Twin moves entries on the CPU by several threads. All methods may be called by any
// goroutine; Moves go one after the other.
type Twin struct {
	workers []*worker
	next    atomic.Uint64 // the first entry that is not taken
	under   sync.WaitGroup

	mu     sync.Mutex // guards what follows, which the workers read while a Move is under way
	m      *Move
	args   args
	own    tally
	closed bool
}

// worker is a goroutine of a Twin.
type worker struct {
	wake  chan struct{}
	tally tally
	_     [40]byte // of a cache line: the next worker counts in another
}

// NewTwin starts threads-1 goroutines: the caller of Run is a thread, too.
func NewTwin(threads int) (*Twin, error) {
	if threads < 1 || threads > threadsMax {
		return nil, fmt.Errorf("%d threads, want 1 to %d: %w", threads, threadsMax,
			driver.ErrBounds)
	}
	t := &Twin{}
	for range threads - 1 {
		w := &worker{wake: make(chan struct{}, 1)}
		t.workers = append(t.workers, w)
		go t.work(w)
	}
	return t, nil
}

func (t *Twin) work(w *worker) {
	for range w.wake {
		t.take(&w.tally)
		t.under.Done()
	}
}

// take moves pieces until there are none.
func (t *Twin) take(sum *tally) {
	*sum = clean
	for {
		first := t.next.Add(pieceEntries) - pieceEntries
		if first >= t.args.count {
			return
		}
		move(t.m, &t.args, first, min(pieceEntries, t.args.count-first), sum)
	}
}

// Run is the function of the same name by all threads. A Twin that is closed answers
// driver.ErrClosed.
func (t *Twin) Run(m *Move) (Tally, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.closed {
		return Tally{}, driver.ErrClosed
	}
	t.args = args{}
	if err := m.fill(&t.args); err != nil {
		return Tally{}, err
	}
	t.m = m
	t.next.Store(0)
	helping := t.workers[:min(uint64(len(t.workers)), t.args.count/pieceEntries)]
	t.under.Add(len(helping))
	for _, w := range helping {
		w.wake <- struct{}{}
	}
	t.take(&t.own)
	t.under.Wait()
	t.m = nil
	all := t.own
	for _, w := range helping {
		all.skipped += w.tally.skipped
		all.bad += w.tally.bad
		all.firstBad = min(all.firstBad, w.tally.firstBad)
	}
	return all.sum(t.args.count)
}

// Close ends the goroutines, after the Move in hand. It is idempotent.
func (t *Twin) Close() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if !t.closed {
		t.closed = true
		for _, w := range t.workers {
			close(w.wake)
		}
	}
	return nil
}
