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

// peer is our side of a connection that we dialled. The other side is the owner, whose memory we
// reach. It implements driver.Peer.
type peer struct {
	b     *Backend
	conn  uint64 // its number
	owner address
	self  bool // the other side is this backend
	sock  *net.UnixConn
	inbox inbox

	sendMu sync.Mutex  // held while a control message is sent: the socket has one write deadline
	table  table       // the owner's key table, read-only here
	page   []byte      // the connection page: we made it, both sides write
	event  int         // the owner's eventfd; -1: none yet
	pid    proc.Remote // the owner's process

	announcedCount atomic.Uint64 // announcements so far: each has its number in it

	inflight atomic.Int64 // calls and tags that use the mappings
	closing  atomic.Bool
	lost     atomic.Bool
	lostCh   chan struct{}  // closed with lost
	readerWG sync.WaitGroup // the goroutines of the connection
	closeOne sync.Once

	imports atomic.Pointer[[]atomic.Pointer[imported]] // by key; replaced under mu, read without it

	mu       sync.Mutex // after Backend.mu
	freeKeys []uint32
	arenas   map[uint32]*peerArena
	fetches  map[uint32]*fetch
	fetchID  uint32
	parked   []*job // they wait for pages that are being mapped

	ping     ping
	out      sender // notifications to the owner
	answerMu sync.Mutex
	answers  receiver // the owner's answers; guarded by answerMu
}

var _ driver.Peer = (*peer)(nil)

// Errors of hot paths, made once.
var (
	errUnknownKey = fmt.Errorf("unknown key: %w", driver.ErrBounds)
	errStale      = errors.New("the arena's pages have moved") // never leaves the package
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
	defer b.connecting.Exit() // Close waits for it before it closes b.event and the table
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
		return nil, b.dialError(&owner, err)
	}
	p := &peer{b: b, conn: b.conns.Add(1), owner: owner, self: owner == b.address,
		sock: conn.(*net.UnixConn), event: -1, lostCh: make(chan struct{}),
		arenas: make(map[uint32]*peerArena), fetches: make(map[uint32]*fetch)}
	p.imports.Store(new([]atomic.Pointer[imported]))
	if err := p.handshake(ctx); err != nil {
		if ctx.Err() != nil {
			err = fmt.Errorf("%w: %w", driver.ContextError(ctx), err)
		}
		p.hangUp() // the owner may have listed us: this tells it that we reach no memory
		p.release()
		return nil, err
	}
	return p, b.enlistPeer(p)
}

// dialError adds to the error of a dial why no socket is there, where that can be known.
func (b *Backend) dialError(owner *address, err error) error {
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

// enlistPeer puts a peer on the list and starts its goroutines, unless the backend closes.
func (b *Backend) enlistPeer(p *peer) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.closed.Load() {
		p.hangUp()
		p.release()
		return driver.ErrClosed
	}
	list := append(slices.Clone(*b.peers.Load()), p)
	b.peers.Store(&list)
	p.readerWG.Go(p.readMessages)
	if !p.self && p.pid.Known() {
		p.readerWG.Go(p.watchProcess)
	}
	b.wake() // an Arm that came before did not arm this connection
	return nil
}

// handshake sends the owner our page and event, and receives the owner's table and event.
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
	defer unix.Close(fd) // the mapping keeps the memory
	p.page = page
	word(page, pageRingAt).Store(ring)
	word(page, pageMagicAt).Store(pageMagic)
	p.out.ring, p.answers.ring = ringOf(page, 0), ringOf(page, 1)
	hello := binary.LittleEndian.AppendUint64([]byte{msgHello, version}, ring)
	hello = append(hello, p.b.addr...)
	if err := send(p.sock, p.b.cfg.DialTimeout, hello, []int{fd, p.b.event}); err != nil {
		return fmt.Errorf("greet: %w", err)
	}
	if err := p.readWelcome(); err != nil {
		return err
	}
	if !stop() {
		return context.Cause(ctx)
	}
	return p.sock.SetDeadline(time.Time{})
}

// readWelcome reads the owner's answer to the hello: version, status, number of keys.
func (p *peer) readWelcome() error {
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

// watchProcess closes the connection when the owner's process has ended. The socket may stay open
// then, in a child that inherited it.
func (p *peer) watchProcess() {
	if p.pid.Wait() == nil {
		_ = p.sock.Close() // which ends readMessages
	}
}

// readMessages handles the owner's control messages until the connection ends.
func (p *peer) readMessages() {
	defer p.markLost()
	for {
		kind, body, fds, err := p.inbox.read(p.sock)
		if err != nil {
			return
		}
		switch kind {
		case msgExtents:
			err = p.addAnswer(body, fds)
		case msgPong:
			closeAll(fds)
			p.endPing()
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

// sendControl sends a control message to the owner. If that fails within Config.DialTimeout the
// peer is lost: closing the socket ends readMessages, which marks it so.
func (p *peer) sendControl(msg []byte) {
	p.sendMu.Lock()
	defer p.sendMu.Unlock()
	if err := send(p.sock, p.b.cfg.DialTimeout, msg, nil); err != nil {
		_ = p.sock.Close()
	}
}

// enter begins a use of the mappings, which exit ends. Close waits until all have ended.
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

// Close implements driver.Peer. It waits for the pieces that are being copied, which no peer can
// delay.
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
	p.hangUp()
	p.pid.Release() // which ends watchProcess
	p.readerWG.Wait()
	p.b.mu.Lock()
	list := slices.DeleteFunc(slices.Clone(*p.b.peers.Load()), func(q *peer) bool { return q == p })
	p.b.peers.Store(&list)
	p.b.mu.Unlock()
	p.release()
}

// hangUp tells the owner that no copy of ours reaches its memory any more, and closes the socket,
// which ends readMessages.
func (p *peer) hangUp() {
	if p.page != nil {
		word(p.page, pageLeftAt).Store(1)
	}
	_ = p.sock.Close()
}

// release unmaps and closes what a connection holds, also after a handshake that failed.
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
			_ = unix.Munmap(mem) // a whole mapping of ours: cannot fail
		}
	}
	p.endPing()
	if p.event >= 0 {
		_ = unix.Close(p.event)
	}
	p.pid.Release()
}

// markLost ends all that waits for the owner, and the peer.
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

// ping finds out why the owner's ring stays full: its process is frozen, or its program does not
// take its notifications, which it may do as late as it likes. As long as the process runs, the
// goroutine that reads the owner's socket answers a ping.
type ping struct {
	mu    sync.Mutex
	sent  int64       // when the last one was; 0: never
	timer clock.Timer // ends the wait for its answer; nil: no ping is under way
}

// pingOwner asks the owner for a sign of life, because its ring is full. An owner that gives none
// within Config.Failure is lost. Its memory could still be written, but no notification would reach
// it, and the engine's operations would wait for room without limit.
// Preconditions: the caller is between enter and exit.
func (p *peer) pingOwner() {
	p.ping.mu.Lock()
	defer p.ping.mu.Unlock()
	now := p.b.clock.Now()
	again := p.ping.sent != 0 && now-p.ping.sent < int64(p.b.cfg.Failure/4)
	if p.self || p.ping.timer != nil || again {
		return
	}
	p.ping.sent = now
	p.ping.timer = p.b.clock.AfterFunc(p.b.cfg.Failure, func() {
		_ = p.sock.Close() // which ends readMessages, and the peer is lost
	})
	p.readerWG.Go(func() { p.sendControl([]byte{msgPing}) })
}

// endPing stops the ping under way, if any.
func (p *peer) endPing() {
	p.ping.mu.Lock()
	defer p.ping.mu.Unlock()
	if p.ping.timer != nil {
		p.ping.timer.Stop()
		p.ping.timer = nil
	}
}
