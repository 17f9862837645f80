// SPDX-License-Identifier: Apache-2.0

package hostmem

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"

	"github.com/sluicehq/sluice/driver"
)

// layersMax bounds the descriptors of a Buffer: one message over a Unix socket
// carries 253. piecesMax bounds its mappings: a process has 65,530 by default.
const (
	layersMax = 128
	piecesMax = 16 << 10
)

// renewStep bounds what a Renew holds twice at any time.
const renewStep = 64 << 20

// Renew implements driver.Shared. It copies [off, off+n), widened to whole
// pages (2 MiB with reserved huge pages), and holds at most 64 MiB of it twice.
// After an error the content is whole, but some of the range may still lie in its
// old pages. It takes pages of before again, where pieces join, once each backend that OnRenew
// told says that nothing is written there any more. A Buffer that is cut in too many pieces
// answers driver.ErrFull: a Renew of all of it makes it one piece again. The answer is
// driver.ErrBusy while the pages are held, and where what has entered does not leave within
// enteredMax, and that of ctx where that ends before: then nothing has moved.
func (b *Buffer) Renew(ctx context.Context, off, n uint64) error {
	select {
	case b.renewing <- struct{}{}:
	case <-ctx.Done():
		return fmt.Errorf("renew memory: %w", driver.ContextError(ctx))
	}
	defer func() { <-b.renewing }()
	if err := b.mayRenew(off, n); err != nil {
		return err
	}
	if err := b.landings.Stop(ctx); err != nil {
		return fmt.Errorf("renew memory: %w", err)
	}
	defer b.landings.Resume()
	b.mu.Lock()
	defer b.mu.Unlock()
	if err := b.mayMove(off, n); err != nil { // closed or held meanwhile
		return err
	}
	return b.renew(roundDown(off, b.page), roundUp(off+n, b.page))
}

func (b *Buffer) mayRenew(off, n uint64) error {
	b.mu.RLock()
	defer b.mu.RUnlock()
	return b.mayMove(off, n)
}

// mayMove is an error where the pages of a range cannot move. Preconditions: b.mu is held.
func (b *Buffer) mayMove(off, n uint64) error {
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

// PageBytes returns what Renew widens its range to.
func (b *Buffer) PageBytes() uint64 { return b.page }

// renew moves whole pages.
// Preconditions: b.mu is held, and no landing is under way.
func (b *Buffer) renew(from, to uint64) error {
	huge := b.page == hugeSize && freeHugePages("/") >= (to-from)/hugeSize
	l, err := b.freshLayer(from, to-from, huge)
	if err != nil {
		return fmt.Errorf("renew memory: %w", err)
	}
	over := b.renewals.Tell()
	defer b.retire()
	for at := from; at < to; {
		next := min(to, roundDown(at+renewStep, renewStep))
		err := b.moveTo(l, at, next-at, over)
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

// renewals are what OnRenew asked to be called. Their lock is their own: a caller of
// OnRenew or stop does not wait for a Renew that waits for landings.
type renewals struct {
	mu    sync.Mutex
	calls map[*func() func() bool]struct{}
}

// OnRenew implements driver.Shared.
func (b *Buffer) OnRenew(f func() func() bool) (stop func()) { return b.renewals.OnRenew(f) }

// OnRenew has f called by Tell until stop.
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

// Tell calls them. It stands before the first page moves. over reports whether nothing is written
// to the old pages any more; where none was there to be told, that is never known.
func (r *renewals) Tell() (over func() bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	var writing []func() bool
	if len(r.calls) == 0 {
		writing = append(writing, func() bool { return false })
	}
	for f := range r.calls {
		if over := (*f)(); over != nil {
			writing = append(writing, over)
		}
	}
	return func() bool {
		writing = slices.DeleteFunc(writing, func(over func() bool) bool { return over() })
		return len(writing) == 0
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

// freshLayer returns a layer to whose pages in the range no old mapping leads that is written
// through, and marks it used there.
func (b *Buffer) freshLayer(off, n uint64, huge bool) (*layer, error) {
	full := spliced(b.pieces, piece{off, n, nil}) > piecesMax
	for _, l := range b.layers {
		if l.huge != huge {
			continue
		}
		l.reclaim(off, n)
		if l.used.overlaps(off, n) || full && spliced(b.pieces, piece{off, n, l}) > len(b.pieces) {
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
func (b *Buffer) moveTo(l *layer, off, n uint64, over func() bool) error {
	window := b.mem[off : off+n]
	if err := b.copyTo(l, off, window); err != nil {
		return err
	}
	if err := place(window, l.fd, off); err != nil {
		return err
	}
	b.advise(window)
	if b.opts.Populate && b.collapses(l) {
		_, _ = populate(window, l, off, true) // the pages are there: this only gathers them
	}
	for _, p := range b.pieces {
		from, to := max(p.off, off), min(p.end(), off+n)
		if from < to {
			p.layer.leave(from, to-from, over)
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
	defer func() { err = errors.Join(err, unmap(to)) }()
	if err := bind(to, b.opts.Node); err != nil {
		return err
	}
	if _, err := populate(to, l, off, false); err != nil {
		return err
	}
	_, err = CopyCatchingFault(to, from)
	return err
}

// retire closes the layers that no piece lies in any more.
func (b *Buffer) retire() {
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
