// SPDX-License-Identifier: Apache-2.0

package shm

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/clock"
	"github.com/sluicehq/sluice/internal/hostmem"
	"github.com/sluicehq/sluice/internal/proc"
	"github.com/sluicehq/sluice/internal/session"
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

// Connect implements driver.Backend.
func (b *Backend) Connect(ctx context.Context, addr []byte) (driver.Peer, error) {
	p, err := b.connect(ctx, addr)
	if err != nil {
		switch {
		case b.closed.Load():
			err = driver.ErrClosed
		case ctx.Err() != nil:
			err = fmt.Errorf("%w: %w", driver.ContextError(ctx), err)
		}
		return nil, fmt.Errorf("connect peer: %w", err)
	}
	return p, nil
}

func (b *Backend) connect(ctx context.Context, addr []byte) (*peer, error) {
	if !b.connecting.Enter() {
		return nil, driver.ErrClosed
	}
	defer b.connecting.Exit() // Close takes our descriptors away
	owner, err := decodeAddress(addr)
	if err != nil {
		return nil, err
	}
	if owner.uid != uint32(os.Getuid()) {
		return nil, fmt.Errorf("peer runs as uid %d, we as %d: run both as one user: %w",
			owner.uid, os.Getuid(), os.ErrPermission)
	}
	ctx, cancel := context.WithTimeout(ctx, b.cfg.DialTimeout)
	defer cancel()
	defer context.AfterFunc(b.life, cancel)()
	conn, err := new(net.Dialer).DialContext(ctx, "unixpacket", owner.socket())
	if err != nil {
		return nil, b.unreached(&owner, err)
	}
	p := &peer{b: b, conn: b.conns.Add(1), owner: owner, self: owner == b.address,
		sock: conn.(*net.UnixConn), event: -1, lostCh: make(chan struct{}),
		arenas: make(map[uint32]*peerArena), fetches: make(map[uint32]*fetch)}
	p.imports.Store(new([]atomic.Pointer[imported]))
	if err := p.handshake(ctx); err != nil {
		if ctx.Err() != nil {
			err = fmt.Errorf("%w: %w", driver.ContextError(ctx), err)
		}
		p.leave() // the owner may have welcomed us: we were never in
		p.release()
		return nil, err
	}
	return p, b.adopt(p)
}

// unreached says what keeps a dial from the peer, where that can be known.
func (b *Backend) unreached(owner *address, err error) error {
	switch ours := b.address.net; {
	case owner.dir != "" && errors.Is(err, os.ErrNotExist):
		return fmt.Errorf("no socket of the peer in %s, its SocketDir: mount that directory "+
			"here, too: %w", owner.dir, err)
	case owner.dir == "" && owner.net != ours && owner.net != 0 && ours != 0:
		return fmt.Errorf("the peer is in network namespace %d of this host, and this process in "+
			"%d: set SocketDir on both sides to a directory that both see: %w", owner.net, ours,
			err)
	}
	return err
}

// adopt puts a peer on the list, unless the backend closes.
func (b *Backend) adopt(p *peer) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.closed.Load() {
		p.leave()
		p.release()
		return driver.ErrClosed
	}
	list := append(slices.Clone(*b.peers.Load()), p)
	b.peers.Store(&list)
	p.readerWG.Go(p.listen)
	if !p.self && p.pid.Known() {
		p.readerWG.Go(p.watch)
	}
	b.wake() // the program has armed the connections of before, not this one
	return nil
}

// handshake shows our page and learns of the owner's table.
func (p *peer) handshake(ctx context.Context) (err error) {
	stop := context.AfterFunc(ctx, func() { _ = p.sock.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	if p.pid, err = proc.Identify(p.sock); err != nil {
		return err
	}
	ring := uint64(p.b.cfg.RingBytes)
	fd, page, err := hostmem.NewSealed("sluice-connection", connectionBytes(ring), false)
	if err != nil {
		return err
	}
	defer unix.Close(fd) // the mapping keeps it
	p.page = page
	word(page, pageRingAt).Store(ring)
	word(page, pageMagicAt).Store(pageMagic)
	p.out.ring, p.answers.ring = ringOf(page, 0), ringOf(page, 1)
	hello := binary.LittleEndian.AppendUint64([]byte{msgHello, version}, ring)
	hello = append(hello, p.b.addr...)
	if err := send(p.sock, p.b.cfg.DialTimeout, hello, []int{fd, p.b.event}); err != nil {
		return fmt.Errorf("greet: %w", err)
	}
	if err := p.welcomed(); err != nil {
		return err
	}
	if !stop() {
		return context.Cause(ctx)
	}
	return p.sock.SetDeadline(time.Time{})
}

// welcomed reads the owner's answer: version, status, number of keys.
func (p *peer) welcomed() error {
	kind, body, fds, err := p.inbox.read(p.sock)
	if err != nil {
		return fmt.Errorf("await welcome: %w", err)
	}
	defer func() { closeAll(fds) }()
	if kind != msgWelcome || len(body) < 2 {
		return fmt.Errorf("await welcome: message of kind %d: %w", kind, driver.ErrCorrupt)
	}
	if body[0] != version {
		return fmt.Errorf("peer speaks version %d, we %d: use the same release on both sides: %w",
			body[0], version, driver.ErrVersion)
	}
	if err := session.Status(body[1]).Err(); err != nil {
		return fmt.Errorf("peer refused: %w", err)
	}
	if len(body) != 6 || len(fds) != 2 {
		return fmt.Errorf("await welcome: %d bytes, %d descriptors: %w",
			len(body), len(fds), driver.ErrCorrupt)
	}
	if err := checkEventFD(fds[1]); err != nil {
		return err
	}
	if p.table, err = openTable(fds[0], binary.LittleEndian.Uint32(body[2:])); err != nil {
		return err
	}
	p.event = fds[1]
	fds = fds[:1]
	return nil
}

// watch closes the connection when the owner's process has ended. The socket alone does
// not tell: a child of that process may have inherited it.
func (p *peer) watch() {
	if p.pid.Wait() == nil {
		_ = p.sock.Close() // the reader ends by it
	}
}

// listen reads what the owner says until the connection ends.
func (p *peer) listen() {
	defer p.markLost()
	for {
		kind, body, fds, err := p.inbox.read(p.sock)
		if err != nil {
			return
		}
		switch kind {
		case msgExtents:
			err = p.answered(body, fds)
		case msgPong:
			closeAll(fds)
			p.alive()
		default:
			closeAll(fds)
			err = driver.ErrCorrupt
		}
		if err != nil {
			_ = p.sock.Close()
			return
		}
	}
}

// say sends to the owner; a socket that does not take it is a lost peer, which
// the reader of the socket finds out.
func (p *peer) say(msg []byte) {
	p.saying.Lock()
	defer p.saying.Unlock()
	if err := send(p.sock, p.b.cfg.DialTimeout, msg, nil); err != nil {
		_ = p.sock.Close()
	}
}

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
		a.replace(nil)
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

// ping tells an owner that is frozen from one whose program does not take its
// notifications. Both leave the ring full, and a program may take its time; but the
// goroutine that reads the owner's socket answers as long as the process runs.
type ping struct {
	mu    sync.Mutex
	sent  int64       // 0: never
	timer clock.Timer // nil: none is under way
}

// suspect asks the owner for a sign of life, because its ring is full. One that gives none
// within Config.Failure is lost: no notification would reach it, and the engine's
// operations would wait for room without limit. Bytes would.
// Preconditions: entered.
func (p *peer) suspect() {
	p.ping.mu.Lock()
	defer p.ping.mu.Unlock()
	now := p.b.clock.Now()
	again := p.ping.sent != 0 && now-p.ping.sent < int64(p.b.cfg.Failure/4)
	if p.self || p.ping.timer != nil || again {
		return
	}
	p.ping.sent = now
	p.ping.timer = p.b.clock.AfterFunc(p.b.cfg.Failure, func() {
		_ = p.sock.Close() // the reader ends by it, and the peer is lost
	})
	p.readerWG.Go(func() { p.say([]byte{msgPing}) })
}

// alive ends the ping under way.
func (p *peer) alive() {
	p.ping.mu.Lock()
	defer p.ping.mu.Unlock()
	if p.ping.timer != nil {
		p.ping.timer.Stop()
		p.ping.timer = nil
	}
}
