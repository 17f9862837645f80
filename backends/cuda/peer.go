// SPDX-License-Identifier: Apache-2.0

package cuda

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/session"
)

// peer implements driver.Peer for a backend of this process (to) or of another one (far).
//
// Most of the difference is in its imports. An import of memory of this process uses the memory's
// remoteGrant, which Revoke ends directly. An import of memory of another process has a mapping
// and a slot of shared memory, by which the owner revokes it (farMemory in link.go).
type peer struct {
	driver.PeerBase
	from     *Backend
	to       *Backend      // the backend of this process; nil: the peer is in another process
	far      *link         // the connection to another process; nil: the peer is in this process
	lost     chan struct{} // closed by lose
	loseOnce sync.Once

	entry  sync.RWMutex // held for reading while Submit runs, so that Close can wait for it
	closed bool         // guarded by entry

	unfinished atomic.Int64 // batches that have not ended

	mu      sync.RWMutex // guards what follows
	imports session.Imports[remote]
}

// remote is an import: memory of the peer that batches may use while grant has not ended.
type remote struct {
	m     *memory
	grant *grant
	far   *farMemory // nil: the memory belongs to this process
}

// enter counts a batch that uses the import (grant.enter). It returns false if the import has
// ended.
func (r *remote) enter() bool {
	if r.grant.enter() {
		return true
	}
	r.far.releaseIfUnused(r.grant)
	return false
}

// revoked reports whether the owner has ended the import.
func (r *remote) revoked() bool {
	if r.far != nil { // Drop ends the grant as well, and must not fail running batches
		return r.grant.far.state.Load() == importRevoked
	}
	return r.grant.ended.Load()
}

// leave says that a batch has ended. The last batch of a dropped import releases its mapping.
func (r *remote) leave() {
	r.grant.leave()
	r.far.releaseIfUnused(r.grant)
}

// Connect implements driver.Backend. It finds a backend of this process in the registry, and dials
// one of another process.
func (b *Backend) Connect(ctx context.Context, addr []byte) (driver.Peer, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	if b.closed.Load() {
		return nil, driver.ErrClosed
	}
	registry.RLock()
	to := registry.byAddr[string(addr)]
	registry.RUnlock()
	if to == nil {
		p, err := b.connectFar(ctx, addr)
		if err != nil {
			return nil, err
		}
		return p, nil
	}
	p := &peer{from: b, to: to, lost: make(chan struct{})}
	if err := b.addPeer(b.peers, p); err != nil {
		return nil, err
	}
	if err := to.addPeer(to.senders, p); err != nil {
		_ = p.Close()
		return nil, fmt.Errorf("connect with cuda: %w", driver.ErrPeerLost)
	}
	return p, nil
}

// addPeer adds p to b.peers or b.senders, unless b is closed. Close of b closes the peers in peers,
// and marks those in senders as lost.
func (b *Backend) addPeer(set map[*peer]struct{}, p *peer) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.closed.Load() {
		return driver.ErrClosed
	}
	set[p] = struct{}{}
	return nil
}

// sources returns the backends of this process that have a peer whose batches use memory of b.
func (b *Backend) sources() (list []*Backend) {
	b.mu.Lock()
	defer b.mu.Unlock()
	seen := map[*Backend]bool{}
	for p := range b.senders {
		if !seen[p.from] {
			seen[p.from] = true
			list = append(list, p.from)
		}
	}
	return list
}

// Import implements driver.Peer.
func (p *peer) Import(token []byte) (uint32, uint64, error) {
	p.entry.RLock()
	closed, gone := p.closed, p.gone()
	if p.far != nil || closed || gone {
		p.entry.RUnlock()
		switch {
		case closed:
			return 0, 0, driver.ErrClosed
		case gone:
			return 0, 0, driver.ErrPeerLost
		}
		return p.importFar(token) // does not hold entry while it waits, so that Close can go on
	}
	defer p.entry.RUnlock()
	t, err := session.DecodeToken(token, &p.to.owner)
	if err != nil {
		return 0, 0, err
	}
	m := p.to.memories.At(t.Key)
	if err := m.checkToken(&t); err != nil {
		return 0, 0, err
	}
	key, err := p.addImport(&remote{m: m, grant: &m.remoteGrant})
	return key, t.Size, err
}

// addImport gives an import a key, or forgets the import if no key is free.
func (p *peer) addImport(r *remote) (key uint32, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if key, err = p.imports.Add(r); err != nil {
		r.forget()
	}
	return key, err
}

// remote returns the import with this key, or nil.
func (p *peer) remote(key uint32) *remote {
	p.mu.RLock()
	defer p.mu.RUnlock()
	return p.imports.At(key)
}

// Drop implements driver.Peer.
func (p *peer) Drop(key uint32) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if r := p.imports.Drop(key); r != nil {
		r.forget()
	}
}

// gone reports whether the other side has closed or is lost.
func (p *peer) gone() bool {
	if p.far == nil {
		return p.to.closed.Load()
	}
	select {
	case <-p.lost:
		return true
	default:
		return false
	}
}

// Lost implements driver.Peer.
func (p *peer) Lost() <-chan struct{} { return p.lost }

// lose marks the connection as ended by either side: no new batch starts.
func (p *peer) lose() {
	p.loseOnce.Do(func() {
		close(p.lost)
		if p.far != nil {
			return
		}
		p.to.mu.Lock()
		defer p.to.mu.Unlock()
		delete(p.to.senders, p)
	})
}

// waitForBatches waits until all batches of the peer have ended.
func (p *peer) waitForBatches() {
	_ = await(func() bool {
		p.from.help()
		return p.unfinished.Load() == 0
	}, neverStop)
}

// Cancel implements driver.Peer.
func (p *peer) Cancel(tag uint64) {
	p.from.cancel(func(j *job) bool { return j.p == p && j.tag == tag }, &driver.ErrAborted)
}

// Close implements driver.Peer.
func (p *peer) Close() error {
	p.entry.Lock()
	p.closed = true
	p.entry.Unlock()
	p.from.cancel(func(j *job) bool { return j.p == p }, &driver.ErrClosed)
	p.waitForBatches()
	p.far.end()
	p.mu.Lock()
	p.imports = session.Imports[remote]{}
	p.mu.Unlock()
	p.lose()
	p.from.mu.Lock()
	delete(p.from.peers, p)
	p.from.mu.Unlock()
	return nil
}
