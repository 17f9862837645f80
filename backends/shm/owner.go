// SPDX-License-Identifier: Apache-2.0

package shm

import (
	"crypto/subtle"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/hostmem"
	"github.com/sluicehq/sluice/internal/proc"
	"github.com/sluicehq/sluice/internal/session"
)

// inbound is our side of a connection that a peer dialled: it reaches our memory.
type inbound struct {
	b     *Backend
	conn  uint64 // its number
	self  bool   // the peer is this backend
	sock  *net.UnixConn
	inbox inbox
	event int // the peer's eventfd; -1: none
	pid   proc.Remote

	mu           sync.Mutex // guards the page and what was read of it
	page         []byte     // the connection page, which the peer made; nil after release
	in           receiver   // notifications
	out          sender     // answers
	gone         bool       // the socket has ended: no more messages will come
	lossReported bool       // Receive has told the program so
	left         bool       // proof that the peer is out of our memory for good

	// Announcements that are remembered, by line: see announcement.
	harmless, gated [announceMax]uint64
}

// handshakesMax bounds what connections can make us hold before they have said hello: a
// socket and 17 KB each, for Config.DialTimeout.
const handshakesMax = 16

// accept serves peers until the listener is closed.
func (b *Backend) accept() {
	defer b.tasks.Done()
	_ = b.lobby.Serve(b.listener, func(conn net.Conn, v *session.Visit) bool {
		b.tasks.Go(func() {
			if !v.Wait() {
				return
			}
			c, err := b.greet(conn.(*net.UnixConn))
			v.Leave()
			if err != nil {
				_ = conn.Close() // the other side learns no more than that
				return
			}
			c.serve()
		})
		return true
	})
}

// greet checks a new connection and answers it.
func (b *Backend) greet(conn *net.UnixConn) (*inbound, error) {
	if err := conn.SetDeadline(time.Now().Add(b.cfg.DialTimeout)); err != nil {
		return nil, err
	}
	c := &inbound{b: b, sock: conn, event: -1}
	var err error
	if c.pid, err = identify(conn); err != nil {
		return nil, err // so another user's connection does not keep its place
	}
	kind, body, fds, err := c.inbox.read(conn)
	if err != nil {
		c.pid.Release()
		return nil, err
	}
	if kind == msgHello {
		err = c.hello(body, fds)
	} else {
		closeAll(fds)
		err = fmt.Errorf("hello of kind %d: %w", kind, driver.ErrCorrupt)
	}
	if err == nil {
		err = b.enlistInbound(c)
	}
	welcome := []byte{msgWelcome, version, byte(session.StatusOf(err))}
	welcome = binary.LittleEndian.AppendUint32(welcome, b.table.keys)
	if err != nil {
		_ = send(conn, b.cfg.DialTimeout, welcome, nil)
		c.release()
		return nil, err
	}
	// Once the welcome is out the peer may send messages: nothing may fail then.
	err = conn.SetDeadline(time.Time{})
	if err == nil {
		err = send(conn, b.cfg.DialTimeout, welcome, []int{b.tableFD, b.event})
	}
	if err != nil {
		b.removeInbound(c)
	}
	return c, err
}

var identify = proc.Identify // tests have a peer of another PID namespace

// hello checks the peer's hello (version, ring size, address) and maps its page.
func (c *inbound) hello(body []byte, fds []int) (err error) {
	defer func() { closeAll(fds) }()
	if len(body) < 1 || body[0] != version {
		return fmt.Errorf("hello: %w", driver.ErrVersion)
	}
	if len(body) < 9 || len(fds) != 2 {
		return fmt.Errorf("hello of %d bytes, %d descriptors: %w", len(body), len(fds),
			driver.ErrCorrupt)
	}
	ring := binary.LittleEndian.Uint64(body[1:])
	from, err := decodeAddress(body[9:])
	if err != nil {
		return err
	}
	if !ringSizeFits(ring) {
		return fmt.Errorf("ring of %d bytes: %w", ring, driver.ErrCorrupt)
	}
	if err := checkEventFD(fds[1]); err != nil {
		return err
	}
	page, err := hostmem.MapSealed(fds[0], connectionBytes(ring), unix.PROT_READ|unix.PROT_WRITE)
	if err != nil {
		return err
	}
	if word(page, pageMagicAt).Load() != pageMagic || word(page, pageRingAt).Load() != ring {
		_ = unix.Munmap(page)
		return fmt.Errorf("connection page: %w", driver.ErrCorrupt)
	}
	c.page, c.event = page, fds[1]
	c.in.ring, c.out.ring = ringOf(page, 0), ringOf(page, 1)
	c.self = from == c.b.address && c.pid.PID == os.Getpid()
	fds = fds[:1] // the event stays
	return nil
}

// ofProcess counts the connections of one process. A connection that ended without a proof that its
// peer is out stays for as long as that process lives, so one process has half of the places at
// most. Those of other PID namespaces, which have no number here, are counted as one.
func ofProcess(list []*inbound, pid int) (n int) {
	for _, c := range list {
		if c.pid.PID == pid {
			n++
		}
	}
	return n
}

// enlistInbound puts a connection on the list that Revoke and Receive go through, before the
// welcome goes out: no peer is ever in our memory without being on it.
func (b *Backend) enlistInbound(c *inbound) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	list := *b.inbound.Load()
	if b.closed.Load() {
		return driver.ErrClosed
	}
	if len(list) >= b.cfg.ConnsMax {
		return fmt.Errorf("%d peers, raise Config.ConnsMax: %w", len(list), driver.ErrFull)
	}
	if n := ofProcess(list, c.pid.PID); n >= max(1, b.cfg.ConnsMax/2) && !c.self {
		return fmt.Errorf("%d connections of process %d, raise Config.ConnsMax: %w", n, c.pid.PID,
			driver.ErrFull)
	}
	c.conn = b.conns.Add(1)
	list = append(slices.Clone(list), c)
	b.inbound.Store(&list)
	b.wake() // an Arm that came before did not arm this connection
	return nil
}

// serve answers the peer until it hangs up, or its process ends: a child of that may have
// inherited the socket.
func (c *inbound) serve() {
	var watch sync.WaitGroup
	if !c.self && c.pid.Known() {
		watch.Go(func() {
			if c.pid.Wait() == nil {
				c.hangUp()
			}
		})
	}
	for {
		kind, body, fds, err := c.inbox.read(c.sock)
		if err != nil {
			break // the connection has ended
		}
		closeAll(fds) // a peer has none to give after its hello
		switch kind {
		case msgFetch:
			err = c.answerFetch(body)
		case msgPing:
			err = c.sendControl([]byte{msgPong}, nil)
		default:
			err = driver.ErrCorrupt
		}
		if err != nil {
			c.hangUp()
		}
	}
	c.mu.Lock()
	c.gone = true
	c.hasLeft()
	c.mu.Unlock()
	c.hangUp()
	c.closeDescriptors()
	c.pid.StopWaits()
	watch.Wait()
	c.b.wake()
}

// hasLeft looks for a proof that the peer is out of our memory, and remembers it: the peer has
// written so in the page, or its process has ended. A message over the socket could be lost when
// the socket is reset.
// Preconditions: c.mu is held.
func (c *inbound) hasLeft() bool {
	if !c.left && c.page != nil {
		c.left = word(c.page, pageLeftAt).Load() != 0 || c.pid.Dead()
	}
	return c.left
}

// answerFetch sends the extents of the arena that a token opens: those that there are now, with
// their generation. Only an error of the connection is returned.
func (c *inbound) answerFetch(body []byte) error {
	if len(body) < 4 {
		return fmt.Errorf("request of %d bytes: %w", len(body), driver.ErrCorrupt)
	}
	id := binary.LittleEndian.Uint32(body)
	a, err := c.b.openArena(body[4:])
	if err != nil {
		return c.sendControl(answerHead(id, err, 0, 0, 0, 0), nil)
	}
	extents, fds, generation, err := a.duplicates(&c.b.table)
	defer func() { closeAll(fds) }()
	c.b.mu.Lock()
	size := a.size
	c.b.releaseArena(a)
	c.b.mu.Unlock()
	if err == nil && (len(fds) > fdsMax || len(extents) > extentsMax) {
		err = fmt.Errorf("shared memory in %d descriptors, %d extents: %w",
			len(fds), len(extents), driver.ErrFull)
	}
	if err != nil {
		return c.sendControl(answerHead(id, err, 0, 0, 0, 0), nil)
	}
	with := fds // the first part carries them
	for part := range slices.Chunk(extents, extentsPart) {
		msg := answerHead(id, nil, generation, size, len(extents), len(part))
		for _, e := range part {
			msg = binary.LittleEndian.AppendUint64(msg, e.Off)
			msg = binary.LittleEndian.AppendUint64(msg, e.Len)
			msg = binary.LittleEndian.AppendUint64(msg, e.FDOff)
			msg = binary.LittleEndian.AppendUint32(msg, uint32(e.FD))
		}
		if err := c.sendControl(msg, with); err != nil {
			return err
		}
		with = nil
	}
	return nil
}

// openArena checks a token against the secret itself, and returns its arena with one more
// reference.
func (b *Backend) openArena(tok []byte) (*arena, error) {
	t, err := session.DecodeToken(tok, &b.address.id)
	if err != nil {
		return nil, err
	}
	if _, err := b.table.check(&t); err != nil {
		return nil, err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	m := b.memory(t.Key)
	if m == nil || subtle.ConstantTimeCompare(m.secret[:], t.Secret[:]) != 1 {
		return nil, driver.ErrRevoked
	}
	if m.arena == nil {
		return nil, driver.ErrBounds
	}
	m.arena.refs++
	return m.arena, nil
}

// duplicates returns the extents with indices in fds, which are the caller's also after an error,
// and their generation. Pages stay where they are only while this runs: a peer that does not read
// its socket holds up no Revoke.
func (a *arena) duplicates(
	t *table,
) (extents []driver.Extent, fds []int, generation uint64, err error) {
	index := make(map[int]int)
	err = a.shared.Lend(func(lent []driver.Extent) error {
		generation = t.generation(a.index).Load()
		for _, e := range lent {
			at, ok := index[e.FD]
			if !ok {
				fd, err := unix.FcntlInt(uintptr(e.FD), unix.F_DUPFD_CLOEXEC, 0)
				if err != nil {
					return duplicateError(err)
				}
				at, fds = len(fds), append(fds, fd)
				index[e.FD] = at
			}
			e.FD = at
			extents = append(extents, e)
		}
		return nil
	})
	return extents, fds, generation, err
}

// duplicateError is ErrFull where this process has no descriptor left: the peer may ask again.
func duplicateError(errno error) error {
	err := fmt.Errorf("duplicate descriptor: %w", os.NewSyscallError("fcntl", errno))
	if errors.Is(errno, unix.EMFILE) {
		err = fmt.Errorf("%w: %w", err, driver.ErrFull)
	}
	return err
}

const answerHeadBytes = 33

// answerHead begins a part of an answer: kind, number of the request, status, generation, bytes of
// the arena, extents of all parts and of this one.
func answerHead(id uint32, why error, generation, size uint64, total, count int) []byte {
	msg := binary.LittleEndian.AppendUint32([]byte{msgExtents}, id)
	msg = append(msg, byte(session.StatusOf(why)), 0, 0, 0)
	msg = binary.LittleEndian.AppendUint64(msg, generation)
	msg = binary.LittleEndian.AppendUint64(msg, size)
	msg = binary.LittleEndian.AppendUint32(msg, uint32(total))
	return binary.LittleEndian.AppendUint32(msg, uint32(count))
}

func (c *inbound) sendControl(msg []byte, fds []int) error {
	return send(c.sock, c.b.cfg.DialTimeout, msg, fds)
}

// hangUp closes the socket, which ends serve.
func (c *inbound) hangUp() { _ = c.sock.Close() }

// finished reports whether nothing needs the connection any more.
func (c *inbound) finished() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.lossReported && c.hasLeft()
}

// removeInbound takes a finished connection off the list, and releases it.
func (b *Backend) removeInbound(c *inbound) {
	b.mu.Lock()
	list := slices.Clone(*b.inbound.Load())
	if i := slices.Index(list, c); i >= 0 {
		list = slices.Delete(list, i, i+1)
		b.inbound.Store(&list)
	}
	b.mu.Unlock()
	c.release()
}

// closeDescriptors closes the descriptors of a connection that has ended, though its last messages
// may wait for Receive for long.
func (c *inbound) closeDescriptors() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.event >= 0 {
		_ = unix.Close(c.event)
		c.event = -1
	}
	if c.left {
		c.pid.Release()
	}
}

// release gives back what the connection holds.
func (c *inbound) release() {
	c.hangUp()
	c.closeDescriptors()
	c.mu.Lock()
	defer c.mu.Unlock()
	c.in.ring, c.out.ring = ring{}, ring{}
	if c.page != nil {
		_ = unix.Munmap(c.page) // a whole mapping of ours: cannot fail
		c.page = nil
	}
	c.pid.Release()
}
