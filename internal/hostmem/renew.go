// SPDX-License-Identifier: Apache-2.0

package hostmem

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sluicehq/sluice/driver"
)

// layersMax bounds the descriptors of a Buffer: one message over a Unix socket
// carries 253. piecesMax bounds its mappings: a process has 65,530 by default.
const (
	layersMax = 128
	piecesMax = 16 << 10
)

// renewStep bounds the bytes of which a Renew holds both the old and the new pages.
const renewStep = 64 << 20

// Renew implements driver.Shared: it gives the range [off, off+n), widened to whole pages (2 MiB
// with reserved huge pages), other pages with the same content at the same address. It needs memory
// for at most 64 MiB more at a time.
//
// Pages that were replaced before are used again once each callback of OnRenew has said that no
// process writes to them any more. After an error the content is intact, but a part of the range
// may still have its old pages. The errors:
//
//   - driver.ErrFull: the Buffer is cut into too many pieces. A Renew of all of it makes it one
//     piece again.
//   - driver.ErrBusy: a device holds the pages (Hold), or a write that has called Enter has not
//     called Leave within enteredMax. Nothing has moved.
//   - that of ctx, if ctx ends while Renew waits: nothing has moved.
func (b *Buffer) Renew(ctx context.Context, off, n uint64) error {
	select {
	case b.renewing <- struct{}{}:
	case <-ctx.Done():
		return fmt.Errorf("renew memory: %w", driver.ContextError(ctx))
	}
	defer func() { <-b.renewing }()
	b.mu.RLock()
	err := b.checkRenew(off, n)
	b.mu.RUnlock()
	if err != nil {
		return err
	}
	if err := b.stop(ctx); err != nil {
		return fmt.Errorf("renew memory: %w", err)
	}
	defer b.resume()
	b.mu.Lock()
	defer b.mu.Unlock()
	if err := b.checkRenew(off, n); err != nil { // closed or held meanwhile
		return err
	}
	return b.renew(roundDown(off, b.page), roundUp(off+n, b.page))
}

// checkRenew returns an error if the pages of a range cannot be replaced now. Precondition: b.mu is
// held.
func (b *Buffer) checkRenew(off, n uint64) error {
	if b.mem == nil {
		return fmt.Errorf("renew memory: %w", driver.ErrClosed)
	}
	if n == 0 || off > b.len || n > b.len-off {
		return fmt.Errorf("renew [%d, +%d) of %d bytes: %w", off, n, b.len, driver.ErrBounds)
	}
	if b.holds > 0 {
		return fmt.Errorf("renew memory whose pages %d registrations with a device hold, close "+
			"those first: %w", b.holds, driver.ErrBusy)
	}
	return nil
}

// PageBytes returns the page size to which Renew widens its range, in bytes.
func (b *Buffer) PageBytes() uint64 { return b.page }

// renew moves whole pages.
// Preconditions: b.mu is held, and no landing is under way.
func (b *Buffer) renew(from, to uint64) error {
	huge := b.page == HugeSize && freeHugePages("/") >= (to-from)/HugeSize
	l, err := b.freshLayer(from, to-from, huge)
	if err != nil {
		return fmt.Errorf("renew memory: %w", err)
	}
	quiet := b.callOnRenew()
	defer b.closeUnusedLayers()
	for at := from; at < to; {
		next := min(to, roundDown(at+renewStep, renewStep))
		err := b.moveTo(l, at, next-at, quiet)
		if err != nil {
			l.discard(at, next-at)
			l.used.remove(at, to-at)
		}
		if err != nil && l.huge { // the reserved pages were taken meanwhile
			if l, err = b.freshLayer(at, to-at, false); err == nil {
				continue
			}
		}
		if err != nil {
			return fmt.Errorf("renew memory: %w", err)
		}
		at = next
	}
	return nil
}

// renewals are the functions that OnRenew was given. They have a lock of their own, so that OnRenew
// and its stop do not wait for a Renew that waits for landings.
type renewals struct {
	mu    sync.Mutex
	calls map[*func() func() bool]struct{}
}

// OnRenew implements driver.Shared.
func (r *renewals) OnRenew(f func() func() bool) (stop func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.calls == nil {
		r.calls = make(map[*func() func() bool]struct{})
	}
	r.calls[&f] = struct{}{}
	return func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		delete(r.calls, &f)
	}
}

// callOnRenew calls the functions of OnRenew, before the first page moves. quiet reports, whenever
// it is called, whether nothing is written to the old pages any more. With no such function that is
// never known.
func (r *renewals) callOnRenew() (quiet func() bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	var all []func() bool
	if len(r.calls) == 0 {
		all = append(all, func() bool { return false })
	}
	for f := range r.calls {
		if quiet := (*f)(); quiet != nil {
			all = append(all, quiet)
		}
	}
	return func() bool {
		all = slices.DeleteFunc(all, func(quiet func() bool) bool { return quiet() })
		return len(all) == 0
	}
}

var _ driver.Holder = (*Buffer)(nil)

// Hold implements driver.Holder.
func (b *Buffer) Hold() (release func(), err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.mem == nil {
		return nil, fmt.Errorf("hold memory: %w", driver.ErrClosed)
	}
	b.holds++
	return sync.OnceFunc(func() {
		b.mu.Lock()
		b.holds--
		b.mu.Unlock()
	}), nil
}

// freshLayer returns a layer whose pages in the range no process writes to, and marks the range
// used in it.
func (b *Buffer) freshLayer(off, n uint64, huge bool) (*layer, error) {
	full := piecesAfterSplice(b.pieces, piece{off, n, nil}) > piecesMax
	for _, l := range b.layers {
		if l.huge != huge {
			continue
		}
		l.reclaim(off, n)
		if l.used.overlaps(off, n) ||
			full && piecesAfterSplice(b.pieces, piece{off, n, l}) > len(b.pieces) {
			continue
		}
		l.used.add(off, n)
		return l, nil
	}
	if full {
		return nil, fmt.Errorf("%d pieces: renew all of it: %w", len(b.pieces), driver.ErrFull)
	}
	if len(b.layers) >= layersMax && n < uint64(len(b.mem)) {
		return nil, fmt.Errorf("%d layers: renew all of it: %w", len(b.layers), driver.ErrFull)
	}
	l, err := newLayer(b.opts.Purpose, uint64(len(b.mem)), huge)
	if err != nil {
		return nil, err
	}
	l.used.add(off, n)
	b.layers = append(b.layers, l)
	return l, nil
}

// moveTo moves one range to a layer. No piece has changed if it fails.
func (b *Buffer) moveTo(l *layer, off, n uint64, quiet func() bool) error {
	window := b.mem[off : off+n]
	if err := b.copyTo(l, off, window); err != nil {
		return err
	}
	if err := Place(window, l.fd, off); err != nil {
		return mapError(err, n)
	}
	b.advise(window)
	if b.opts.Populate && b.collapses(l) {
		_, _ = populate(window, l, off, true) // the pages are there: this only gathers them
	}
	for _, p := range b.pieces {
		from, to := max(p.off, off), min(p.end(), off+n)
		if from < to {
			p.layer.retire(from, to-from, quiet)
		}
	}
	b.pieces = splice(b.pieces, piece{off, n, l})
	return nil
}

// copyTo fills a range of a layer, page by page found beforehand.
func (b *Buffer) copyTo(l *layer, off uint64, from []byte) (err error) {
	to, err := mapAnywhere(uint64(len(from)), l.fd, off)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, Unmap(to)) }()
	if err := bind(to, b.opts.Node); err != nil {
		return err
	}
	if _, err := populate(to, l, off, false); err != nil {
		return err
	}
	_, err = CopyCatchingFault(to, from)
	return err
}

// closeUnusedLayers closes the layers in which no piece lies any more.
func (b *Buffer) closeUnusedLayers() {
	live := make(map[*layer]bool, len(b.layers))
	for _, p := range b.pieces {
		live[p.layer] = true
	}
	kept := b.layers[:0]
	for _, l := range b.layers {
		if live[l] {
			kept = append(kept, l)
		} else {
			_ = l.close() // a memfd has nothing to flush
		}
	}
	clear(b.layers[len(kept):])
	b.layers = kept
}

// landings counts the writes of this process that are under way in a memory, so that a Renew does
// not replace pages under them. A write adds to inside twice: a cache line that nothing else
// touches while no Renew runs.
//
// A Renew waits until inside is 0, and new writes wait for the Renew, but at most for patience: a
// write that has entered may be unable to leave before another has entered, as in a ring of
// requests that one goroutine both submits and completes. Once the Renew replaces pages it depends
// on no write, so every write then waits for its end.
type landings struct {
	_      [64]byte
	inside atomic.Int64 // writes between Enter and Leave
	phase  atomic.Int32 // of the Renew
	_      [64]byte
	over   atomic.Pointer[chan struct{}] // closed when the Renew has ended
}

// The phases of a Renew. C code that writes knows renewMoves by its value.
const (
	renewNone = iota
	renewWaits
	renewMoves
)

// patience is how long a write waits for a Renew that itself waits for writes.
const patience = 10 * time.Millisecond

// enteredMax is how long a Renew waits for writes that have entered. Tests shorten it.
var enteredMax = 5 * time.Second

// Landings returns the two words of Enter and Leave, for C code that writes to the memory: it adds
// 1 to inside; if phase is 2, it subtracts the 1 and tries again.
func (b *Buffer) Landings() (inside *atomic.Int64, phase *atomic.Int32) {
	return &b.inside, &b.phase
}

// Enter implements driver.Shared: it waits for a Renew that runs. No page is replaced from then on
// until Leave.
func (l *landings) Enter() {
	l.inside.Add(1) // pairs with the store of the phase in stop
	if l.phase.Load() == renewNone {
		return
	}
	for {
		l.inside.Add(-1)
		if over := l.over.Load(); over != nil {
			l.await(*over)
		}
		l.inside.Add(1)
		if l.phase.Load() != renewMoves {
			return
		}
	}
}

// TryEnter implements driver.Shared: it is Enter if no Renew waits or runs, and returns false
// otherwise.
func (l *landings) TryEnter() bool {
	l.inside.Add(1)
	if l.phase.Load() == renewNone {
		return true
	}
	l.inside.Add(-1)
	return false
}

// Leave implements driver.Shared: it ends what Enter began.
func (l *landings) Leave() { l.inside.Add(-1) }

// await waits until a Renew is over, or for patience if the Renew has not begun to replace pages.
func (l *landings) await(over chan struct{}) {
	timer := time.NewTimer(patience)
	defer timer.Stop()
	select {
	case <-over:
		return
	case <-timer.C:
	}
	if l.phase.Load() == renewMoves {
		<-over
	}
}

// stop waits until no write is inside, and lets none enter until resume. After an error, which is
// that of ctx or driver.ErrBusy, writes go on as before. Only one goroutine may call it at a time.
func (l *landings) stop(ctx context.Context) error {
	over := make(chan struct{})
	l.over.Store(&over)
	l.phase.Store(renewWaits)
	end := time.Now().Add(enteredMax)
	for pause := time.Microsecond; ; pause = min(2*pause, time.Millisecond) {
		if l.inside.Load() == 0 {
			l.phase.Store(renewMoves)
			if l.inside.Load() == 0 {
				return nil
			}
			l.phase.Store(renewWaits) // a write entered between the two loads
		}
		var err error
		switch {
		case ctx.Err() != nil:
			err = driver.ContextError(ctx)
		case time.Now().After(end):
			err = fmt.Errorf("a write into it has not ended within %v: %w", enteredMax,
				driver.ErrBusy)
		}
		if err != nil {
			l.resume()
			return err
		}
		if pause < 50*time.Microsecond {
			runtime.Gosched()
		} else {
			time.Sleep(pause)
		}
	}
}

// resume ends the Renew: writes that wait for it go on.
func (l *landings) resume() {
	l.phase.Store(renewNone)
	close(*l.over.Load())
}
