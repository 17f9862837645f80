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
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/hostmem"
	"github.com/sluicehq/sluice/internal/proc"
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
	if !b.entry.Enter() {
		return nil, driver.ErrClosed
	}
	defer b.entry.Exit() // Close takes our descriptors away
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
	if err := p.inbox.open(p.sock); err != nil {
		return err
	}
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
	kind, body, fds, err := p.inbox.read()
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
	if err := statusError(status(body[1])); err != nil {
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
		kind, body, fds, err := p.inbox.read()
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
