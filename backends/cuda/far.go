// SPDX-License-Identifier: Apache-2.0

package cuda

import (
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	gpu "github.com/sluicehq/sluice/csrc/cuda"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/sealed"
)

// farPeer is a peer in another process. Notifications take another backend.
type farPeer struct {
	driver.PeerBase
	p *peer
}

// Import implements driver.Peer.
func (f farPeer) Import(token []byte) (key uint32, size uint64, err error) {
	type outcome struct {
		r   *remote
		err error
	}
	if f.p.gone() {
		return 0, 0, f.p.why()
	}
	done := make(chan outcome, 1)
	if !f.p.far.begin(func() {
		r, err := f.p.far.open(token)
		if err == nil {
			key, err = f.p.keepFar(r)
		}
		done <- outcome{r, err}
	}) {
		return 0, 0, driver.ErrClosed
	}
	o := <-done
	if o.err != nil {
		return 0, 0, fmt.Errorf("import device memory of another process: %w", o.err)
	}
	return key, o.r.m.seg.Len, nil
}

// Drop implements driver.Peer.
func (f farPeer) Drop(key uint32) { f.p.Drop(key) }

// Can implements driver.Peer: messages take another backend.
func (f farPeer) Can() driver.Can { return f.p.Can() }

// Submit implements driver.Peer.
func (f farPeer) Submit(tag uint64, b *driver.Batch) error { return f.p.Submit(tag, b) }

// Cancel implements driver.Peer.
func (f farPeer) Cancel(tag uint64) { f.p.Cancel(tag) }

// Lost implements driver.Peer.
func (f farPeer) Lost() <-chan struct{} { return f.p.lost }

// Explain implements driver.Peer.
func (f farPeer) Explain(localKey, remoteKey uint32) string {
	return f.p.Explain(localKey, remoteKey)
}

// Close implements driver.Peer.
func (f farPeer) Close() error { return f.p.Close() }

// why says what a connection that is no more has ended by.
func (p *peer) why() error {
	p.entry.RLock()
	defer p.entry.RUnlock()
	if p.closed {
		return driver.ErrClosed
	}
	return driver.ErrPeerLost
}

// keepFar gives a key, unless the connection was closed meanwhile.
func (p *peer) keepFar(r *remote) (uint32, error) {
	p.entry.RLock()
	defer p.entry.RUnlock()
	if p.closed {
		return 0, driver.ErrClosed // and the link lets go of everything
	}
	return p.keep(r)
}

// farMemory is an import: a slot of the owner's, and the mapping.
type farMemory struct {
	l         *link
	token     []byte
	slot      uint32
	on        *mapped
	once      sync.Once
	reopening atomic.Bool
}

// open shows a token, and maps what it opens.
func (l *link) open(token []byte) (*remote, error) {
	if len(token) > driver.TokenMax {
		return nil, driver.ErrBadToken
	}
	a, err := l.ask(token)
	if err != nil {
		closeDescriptor(a.fd)
		return nil, err
	}
	defer closeDescriptor(a.fd)
	m, on, err := l.reach(&a)
	if err != nil {
		_ = l.say(&head{Kind: sayDrop, Slot: a.Slot}, nil)
		return nil, err
	}
	shared := &words{users: sealed.Word(l.users, int(8*a.Slot)), state: sealed.Word(l.states,
		int(8*a.Slot))}
	return &remote{m: m, grant: &grant{far: shared},
		far: &farMemory{l: l, token: slices.Clone(token), slot: a.Slot, on: on}}, nil
}

// reach checks an answer and maps the memory, or finds it mapped.
func (l *link) reach(a *answer) (*memory, *mapped, error) {
	if a.Slot >= slotsMax || a.Size == 0 || a.Off > a.Mapped || a.Size > a.Mapped-a.Off ||
		a.fd < 0 {
		return nil, nil, fmt.Errorf("%d bytes at %d of %d in slot %d: %w", a.Size, a.Off, a.Mapped,
			a.Slot, driver.ErrCorrupt)
	}
	b := l.p.from
	d := b.deviceNamed(a.Device)
	if d == nil {
		return nil, nil, fmt.Errorf("memory of a device that this process, or Config.Devices, "+
			"leaves out: %w", driver.ErrNotSupported)
	}
	on, err := l.attach(a, d)
	if err != nil {
		return nil, nil, err
	}
	seg := driver.Segment{Kind: driver.HBM, Len: a.Size, Addr: on.block.At + a.Off,
		Device: d.ordinal, ReadOnly: a.ReadOnly != 0}
	return &memory{b: b, seg: seg, base: seg.Addr, dev: d}, on, nil
}

func (b *Backend) deviceNamed(uuid [16]byte) *device {
	for _, d := range b.devices {
		if d.uuid == uuid {
			return d
		}
	}
	return nil
}

// attach finds or makes the mapping of a block.
func (l *link) attach(a *answer, d *device) (*mapped, error) {
	l.mapping.Lock()
	defer l.mapping.Unlock()
	on := l.maps[a.Block]
	if on == nil {
		block, err := gpu.ImportBlock(d.ordinal, a.fd, a.Mapped)
		if err != nil {
			return nil, err
		}
		on = &mapped{id: a.Block, block: block}
		l.maps[a.Block] = on
	}
	if on.block.Len != a.Mapped {
		return nil, fmt.Errorf("a block of %d bytes that had %d: %w", a.Mapped, on.block.Len,
			driver.ErrCorrupt)
	}
	on.users++
	return on, nil
}

// refused says why no batch begins with an import. Where other memory has come, that is mapped now,
// and the batch may begin then.
func (p *peer) refused(key uint32, r *remote) error {
	if r.far == nil || r.grant.ended.Load() || r.grant.far.state.Load() < passMoves {
		return driver.ErrRevoked
	}
	if r.far.reopening.CompareAndSwap(false, true) && !r.far.l.begin(func() { p.reopen(key, r) }) {
		return driver.ErrClosed
	}
	return driver.ErrFull
}

// reopen shows the token again, and has the key name what it opens now.
func (p *peer) reopen(key uint32, r *remote) {
	fresh, err := p.far.openSoon(r.far.token)
	switch {
	case err == nil:
		p.replace(key, r, fresh)
	case errors.Is(err, driver.ErrTimeout), errors.Is(err, driver.ErrFull):
		r.far.reopening.Store(false) // the next Submit tries again
	default:
		r.grant.end()
	}
	p.from.box.Alarm()
}

// openSoon is open for as long as the owner is replacing the memory.
func (l *link) openSoon(token []byte) (r *remote, err error) {
	late := time.Now().Add(l.p.from.cfg.DialTimeout)
	for pause := time.Millisecond; ; pause *= 2 {
		r, err = l.open(token)
		if !errors.Is(err, driver.ErrFull) || time.Now().After(late) {
			return r, err
		}
		select {
		case <-time.After(pause):
		case <-l.closing:
			return nil, driver.ErrClosed
		}
	}
}

// replace has a key name another import, unless it was dropped meanwhile.
func (p *peer) replace(key uint32, r, fresh *remote) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.imports.Replace(key, r, fresh) {
		r.forget()
		return
	}
	fresh.forget()
}

// forget ends an import, once the last batch that uses it has ended.
func (r *remote) forget() {
	if r.far == nil {
		return
	}
	r.grant.end()
	r.far.letGo(r.grant)
}

// letGo gives the import back if it was forgotten and no batch is in. Unmapping may wait for the
// device, so that the goroutine that ends a batch does not do it.
func (f *farMemory) letGo(g *grant) {
	if f == nil || !g.ended.Load() || !g.quiet() {
		return
	}
	f.once.Do(func() { f.l.begin(f.release) })
}

func (f *farMemory) release() {
	_ = f.l.say(&head{Kind: sayDrop, Slot: f.slot}, nil)
	f.l.mapping.Lock()
	defer f.l.mapping.Unlock()
	f.on.users--
	if f.on.users == 0 {
		delete(f.l.maps, f.on.id)
		_ = f.on.block.Close() // the memory is another's
	}
}
