// SPDX-License-Identifier: Apache-2.0

package fault

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sluicehq/sluice/driver"
)

// peer is a wrapped connection.
type peer struct {
	driver.Peer // the one inside
	b           *Backend
	addr        string
	number      uint64
	over        chan struct{} // closed when it is shut

	entry        sync.RWMutex // held for reading while a batch is handed on
	closed, lost bool         // guarded by entry

	lined    atomic.Int64 // len(line)
	dropping atomic.Int64 // imports that are dropped and still needed

	// Guarded by b.mu:
	imports map[uint32]extent
	line    []*flight // with messages, in order of submission, that wait to be handed on
	stalled time.Time // Submit says full until then
	flapped bool
	dead    bool // watch has ended what waits: Submit holds nothing any more
}

// Connect implements driver.Backend.
func (b *Backend) Connect(ctx context.Context, addr []byte) (driver.Peer, error) {
	if b.closed.Load() {
		return nil, driver.ErrClosed
	}
	number, err := b.mayConnect(addr)
	if err != nil {
		return nil, err
	}
	if err := b.callRules(ctx, Connect, number); err != nil {
		return nil, fmt.Errorf("connect: %w", err)
	}
	if _, err := b.mayConnect(addr); err != nil { // it may have begun to flap meanwhile
		return nil, err
	}
	inner, err := b.Backend.Connect(ctx, addr)
	if err != nil {
		return nil, err
	}
	p := &peer{
		Peer: inner, b: b, addr: string(addr),
		over: make(chan struct{}), imports: map[uint32]extent{},
	}
	b.mu.Lock()
	if b.closed.Load() {
		b.mu.Unlock()
		_ = inner.Close()
		return nil, driver.ErrClosed
	}
	p.number = b.numbers
	b.numbers++
	b.peers[p] = struct{}{}
	if b.holdsOn() {
		b.tasks.Go(p.watch)
	}
	b.mu.Unlock()
	return p, nil
}

// mayConnect returns the number that the next connection gets, or an error while one to the address
// flaps.
func (b *Backend) mayConnect(addr []byte) (number uint64, err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.refused[string(addr)].After(time.Now()) {
		return 0, fmt.Errorf("connect: the connection flaps, by a fault rule: %w",
			driver.ErrPeerLost)
	}
	delete(b.refused, string(addr))
	return b.numbers, nil
}

// holdsOn reports whether a rule has batches wait for the end of the connection.
func (b *Backend) holdsOn() bool {
	for i := range b.rules {
		if d := b.rules[i].Do.kind; d == drop || d == swallow {
			return true
		}
	}
	return false
}

// watch ends what waits for the end of a connection when the other side dies.
func (p *peer) watch() {
	select {
	case <-p.over:
		return
	case <-p.Lost():
	}
	b := p.b
	b.mu.Lock()
	defer b.mu.Unlock()
	p.dead = true
	for _, f := range b.flightsOf(p) {
		if f.state == swallowed || f.kept {
			f.release(driver.ErrPeerLost)
		}
	}
}

// callRules holds a call against the rules: it waits, or is refused.
func (b *Backend) callRules(ctx context.Context, e Event, number uint64) error {
	if b.about&e == 0 {
		return nil
	}
	v := b.judge(&occasion{events: e, peer: number})
	if err := pause(ctx, v.hold); err != nil {
		return err
	}
	if v.ending == refuse {
		return fmt.Errorf("refused by a fault rule: %w", v.err)
	}
	if v.breach.is(skip) {
		return errSkipped
	}
	return nil
}

func pause(ctx context.Context, d time.Duration) error {
	if d <= 0 {
		return nil
	}
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return driver.ContextError(ctx)
	}
}

// Import implements driver.Peer.
func (p *peer) Import(token []byte) (uint32, uint64, error) {
	p.entry.RLock()
	err := p.gone()
	p.entry.RUnlock()
	if err != nil {
		return 0, 0, err
	}
	if err := p.b.callRules(context.Background(), Import, p.number); err != nil {
		return 0, 0, fmt.Errorf("import: %w", err)
	}
	key, size, err := p.Peer.Import(token)
	if err != nil {
		return 0, 0, err
	}
	p.b.mu.Lock()
	defer p.b.mu.Unlock()
	p.imports[key] = extentOf(token, size)
	return key, size, nil
}

// Drop implements driver.Peer. A key that a batch needs which is still to be handed on
// stays with the wrapped backend until then.
func (p *peer) Drop(key uint32) {
	b := p.b
	b.mu.Lock()
	defer b.mu.Unlock()
	e, ok := p.imports[key]
	if !ok || e.dropped {
		return
	}
	e.dropped = true
	p.imports[key] = e
	p.dropping.Add(1)
	p.settleDrops()
}

// settleDrops drops what was asked for and is needed no more.
// Preconditions: b.mu is held.
func (p *peer) settleDrops() {
	if p.dropping.Load() == 0 {
		return
	}
	needed := map[uint32]bool{}
	for _, f := range p.b.flights {
		if f.p != p || f.state != waiting && f.state != handing {
			continue
		}
		for i := range f.batch.Descs {
			needed[f.batch.Descs[i].RemoteKey] = true
		}
		if f.batch.Pattern != nil {
			needed[f.batch.Pattern.RemoteKey] = true
		}
	}
	for key, e := range p.imports {
		if e.dropped && !needed[key] {
			delete(p.imports, key)
			p.dropping.Add(-1)
			p.Peer.Drop(key)
		}
	}
}

// flightsOf lists the flights of a peer, in the order of their tags.
// Preconditions: b.mu is held.
func (b *Backend) flightsOf(p *peer) (list []*flight) {
	for _, f := range b.flights {
		if f.p == p {
			list = append(list, f)
		}
	}
	sortByTag(list)
	return list
}

// shut has the connection take no more, and ends what is held up.
func (p *peer) shut(why error) {
	p.entry.Lock()
	first := !p.closed && !p.lost
	if why == driver.ErrClosed {
		p.closed = true
	} else {
		p.lost = true
	}
	p.entry.Unlock()
	if first {
		close(p.over)
	}
	b := p.b
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, f := range b.flightsOf(p) {
		f.release(why)
	}
}

// Close implements driver.Peer.
func (p *peer) Close() error {
	p.shut(driver.ErrClosed)
	err := p.Peer.Close()
	p.awaitHanded()
	b := p.b
	b.mu.Lock()
	delete(b.peers, p)
	b.mu.Unlock()
	b.signal() // what the wrapped backend has just ended is held back no more
	return err
}

// awaitHanded waits until the clock's goroutine has no flight of a connection in hand that
// takes no more.
func (p *peer) awaitHanded() {
	b := p.b
	b.mu.Lock()
	defer b.mu.Unlock()
	for slices.ContainsFunc(b.flightsOf(p), func(f *flight) bool { return f.state == handing }) {
		b.handed.Wait()
	}
}

// flap loses the connection: no other is made to the address for a while. The wrapped
// connection is closed by a goroutine, since Submit must not wait for it.
// Preconditions: p.entry is held for reading.
func (p *peer) flap(d time.Duration) {
	b := p.b
	b.mu.Lock()
	defer b.mu.Unlock()
	if p.flapped || b.closed.Load() {
		return
	}
	p.flapped = true
	now := time.Now()
	maps.DeleteFunc(b.refused, func(_ string, until time.Time) bool { return until.Before(now) })
	b.refused[p.addr] = now.Add(d)
	b.tasks.Go(func() {
		p.shut(driver.ErrPeerLost)
		_ = p.Peer.Close()
		b.signal()
	})
}

// Cancel implements driver.Peer.
func (p *peer) Cancel(tag uint64) {
	if p.b.held.Load() > 0 && !p.b.cancel(p, tag) {
		return
	}
	p.Peer.Cancel(tag)
}

// cancel ends the waiting of a flight, and reports whether the wrapped backend must be
// told.
func (b *Backend) cancel(p *peer, tag uint64) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	f := b.flights[tag]
	switch {
	case f == nil:
		return true
	case f.p != p:
		return false
	}
	flown := f.state == flying
	f.release(driver.ErrAborted)
	return flown
}

// Explain implements driver.Peer.
func (p *peer) Explain(localKey, remoteKey uint32) string {
	line := p.Peer.Explain(localKey, remoteKey)
	if n := len(p.b.rules); n > 0 {
		line = fmt.Sprintf("%s; behind %d fault rules", line, n)
	}
	return line
}
