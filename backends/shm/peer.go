// SPDX-License-Identifier: Apache-2.0

package shm

import (
	"errors"
	"fmt"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/proc"
)

// peer is our side of a connection that we dialled: it reaches the other side's
// memory. It implements driver.Peer.
type peer struct {
	b     *Backend
	conn  uint64 // its number
	owner address
	self  bool // the other side is this backend
	sock  *net.UnixConn
	inbox inbox

	saying sync.Mutex // one message at a time has a deadline
	table  table      // theirs, read-only
	page   []byte     // ours, shared
	event  int        // theirs
	pid    proc.Remote
	hints  atomic.Uint64 // numbers announcements

	inflight atomic.Int64 // calls and tags that use the mappings
	closing  atomic.Bool
	lost     atomic.Bool
	lostCh   chan struct{}
	readerWG sync.WaitGroup
	closeOne sync.Once

	imports atomic.Pointer[[]atomic.Pointer[imported]] // replaced under mu, read without

	mu       sync.Mutex // after Backend.mu
	freeKeys []uint32
	arenas   map[uint32]*peerArena
	fetches  map[uint32]*fetch
	fetchID  uint32
	parked   []*job

	ping     ping
	out      sender // notifications
	answerMu sync.Mutex
	answers  receiver // of the owner; guarded by answerMu
}

var _ driver.Peer = (*peer)(nil)

// Hot answers, made once.
var (
	errUnknownKey = fmt.Errorf("unknown key: %w", driver.ErrBounds)
	errStale      = errors.New("pages have moved") // never leaves the package
)

// enter begins a use of the mappings; exit ends it. Close waits for all.
func (p *peer) enter() error {
	p.inflight.Add(1) // pairs with the store in Close
	switch {
	case p.closing.Load():
		p.exit()
		return driver.ErrClosed
	case p.lost.Load():
		p.exit()
		return driver.ErrPeerLost
	}
	return nil
}

func (p *peer) exit() { p.inflight.Add(-1) }

// imported returns what a key names, nil for nothing.
func (p *peer) imported(key uint32) *imported {
	list := *p.imports.Load()
	if key >= uint32(len(list)) {
		return nil
	}
	return list[key].Load()
}

// Close implements driver.Peer. It waits for pieces in hand, which no peer can hold up.
func (p *peer) Close() error {
	p.closeOne.Do(p.close)
	return nil
}

func (p *peer) close() {
	p.closing.Store(true)
	p.failFetches(driver.ErrClosed)
	for pause := 10 * time.Microsecond; p.inflight.Load() > 0; pause = min(2*pause,
		time.Millisecond) {
		time.Sleep(pause)
		p.unpark()
	}
	p.leave()
	p.pid.Release() // as the watcher does
	p.readerWG.Wait()
	p.b.mu.Lock()
	list := slices.DeleteFunc(slices.Clone(*p.b.peers.Load()), func(q *peer) bool { return q == p })
	p.b.peers.Store(&list)
	p.b.mu.Unlock()
	p.release()
}

// leave tells the owner that we are out of its memory for good, and hangs up; the reader
// ends by it.
func (p *peer) leave() {
	if p.page != nil {
		word(p.page, pageLeftAt).Store(1)
	}
	_ = p.sock.Close()
}

// release unmaps and closes what a connection holds. It also serves a handshake
// that broke off.
func (p *peer) release() {
	p.mu.Lock()
	for _, a := range p.arenas {
		a.retire(nil)
	}
	p.arenas = nil
	p.mu.Unlock()
	p.answerMu.Lock()
	p.answers.ring = ring{}
	p.answerMu.Unlock()
	for _, mem := range [][]byte{p.table.mem, p.page} {
		if mem != nil {
			_ = unix.Munmap(mem) // our own, whole: cannot fail
		}
	}
	p.alive()
	if p.event >= 0 {
		_ = unix.Close(p.event)
	}
	p.pid.Release()
}

// markLost ends what waits for the other side.
func (p *peer) markLost() {
	if p.lost.Swap(true) {
		return
	}
	close(p.lostCh)
	p.failFetches(driver.ErrPeerLost)
	p.unpark()
}

// Lost implements driver.Peer.
func (p *peer) Lost() <-chan struct{} { return p.lostCh }

// Conn implements driver.Peer.
func (p *peer) Conn() uint64 { return p.conn }

// Can implements driver.Peer.
func (p *peer) Can() driver.Can { return can }

const can = driver.CanPattern | driver.CanNotify

// Explain implements driver.Peer.
func (p *peer) Explain(localKey, remoteKey uint32) string {
	if p.enter() != nil {
		return "shm: the peer is gone"
	}
	defer p.exit()
	imp := p.imported(remoteKey)
	switch {
	case imp == nil || p.b.memory(localKey) == nil:
		return "shm: unknown key"
	case imp.self != nil:
		return "direct: the memory is this process's own, one copy"
	case imp.arena != nil:
		return "direct: the peer's memory is mapped here, one copy"
	}
	return "kernel: one copy by process_vm_readv or process_vm_writev, page by page, " +
		"because the peer's memory is not shareable: allocate it with Engine.Alloc for the " +
		"direct path"
}
