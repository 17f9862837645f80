// SPDX-License-Identifier: Apache-2.0

package cuda

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	gpu "github.com/sluicehq/sluice/csrc/cuda"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/proc"
	"github.com/sluicehq/sluice/internal/sealed"
)

// link is our side of a connection to another process, whose memory we reach.
type link struct {
	p       *peer
	wire    wire
	owner   proc.Remote
	users   []byte // ours
	states  []byte // theirs, which we only read
	saying  sync.Mutex
	closing chan struct{}
	reader  sync.WaitGroup
	tasks   sync.WaitGroup // imports, and what follows a Drop
	endOnce sync.Once

	mu   sync.Mutex // guards what follows
	over bool
	asks map[uint32]chan answer
	id   uint32

	mapping sync.Mutex // held to map and unmap; guards what follows
	maps    map[uint64]*mapped
}

// answer is what the owner says of a token. The descriptor belongs to the receiver.
type answer struct {
	head
	fd  int
	err error
}

// mapped is memory of the other process.
type mapped struct {
	id    uint64
	block *gpu.Block
	users int // imports
}

// connectFar dials another process.
func (b *Backend) connectFar(ctx context.Context, addr []byte) (driver.Peer, error) {
	if !b.cfg.Peers {
		return nil, fmt.Errorf("connect with cuda: no such backend in this process, and without "+
			"Config.Peers it reaches no further: %w", driver.ErrPeerLost)
	}
	at, err := socketOf(addr)
	if err != nil {
		return nil, fmt.Errorf("connect with cuda: %w", err)
	}
	ctx, cancel := context.WithTimeout(ctx, b.cfg.DialTimeout)
	defer cancel()
	conn, err := new(net.Dialer).DialContext(ctx, at.Net, at.Name)
	if errors.Is(err, unix.ECONNREFUSED) {
		err = fmt.Errorf("%w: %w", driver.ErrPeerLost, err)
	}
	if err != nil {
		return nil, fmt.Errorf("connect with cuda: %w", because(ctx, err))
	}
	p := &peer{from: b, lost: make(chan struct{})}
	p.far = &link{p: p, wire: wire{conn: conn.(*net.UnixConn)}, closing: make(chan struct{}),
		asks: map[uint32]chan answer{}, maps: map[uint64]*mapped{}}
	if err := p.far.greet(ctx); err != nil {
		_ = conn.Close()
		p.far.owner.Release()
		p.far.unmapPages()
		return nil, fmt.Errorf("connect with cuda: %w", because(ctx, err))
	}
	p.far.reader.Go(p.far.listen)
	p.far.reader.Go(p.far.watch)
	if err := b.admit(b.peers, p); err != nil {
		return nil, errors.Join(err, p.Close())
	}
	return farPeer{p: p}, nil
}

// because adds why a context has ended, if it has.
func because(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return fmt.Errorf("%w: %w", driver.ContextError(ctx), err)
	}
	return err
}

// greet shows the page in which we count, and maps that in which the owner ends.
func (l *link) greet(ctx context.Context) error {
	stop := context.AfterFunc(ctx, func() { _ = l.wire.conn.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	var err error
	if l.owner, err = proc.Identify(l.wire.conn); err != nil {
		return err
	}
	fd, page, err := sealed.New("sluice-cuda-batches", pageBytes, true)
	if err != nil {
		return err
	}
	defer closeDescriptor(fd)
	l.users = page
	if err := l.wire.send(&head{Kind: sayHello}, []byte(l.p.from.addr), l.p.from.cfg.DialTimeout,
		fd); err != nil {
		return err
	}
	h, tail, theirs, err := l.wire.receive()
	if err != nil {
		return err
	}
	defer closeDescriptor(theirs)
	if err := h.outcome(tail); err != nil {
		return err
	}
	if h.Kind != sayWelcome || theirs < 0 {
		return fmt.Errorf("welcome of kind %d: %w", h.Kind, driver.ErrCorrupt)
	}
	if l.states, err = sealed.Map(theirs, pageBytes, unix.PROT_READ); err != nil {
		return err
	}
	if !stop() {
		return context.Cause(ctx)
	}
	return l.wire.conn.SetDeadline(time.Time{})
}

// listen reads what the owner says until the connection ends.
func (l *link) listen() {
	defer l.lose()
	for {
		h, tail, fd, err := l.wire.receive()
		if err != nil {
			return
		}
		switch h.Kind {
		case sayAnswer:
			l.deliver(answer{h, fd, h.outcome(tail)})
		case sayEnded:
			closeDescriptor(fd)
			l.p.from.cancel(func(j *job) bool {
				return j.p == l.p && j.overtaken()
			}, &driver.ErrRevoked)
		default:
			closeDescriptor(fd)
			return
		}
	}
}

// watch ends the connection with the owner's process: a child of it may hold the other end open.
func (l *link) watch() {
	if l.owner.Wait() == nil {
		_ = l.wire.conn.Close() // listen ends by it
	}
}

// lose ends what waits for the other side. What is on a stream ends by itself.
func (l *link) lose() {
	_ = l.wire.conn.Close()
	l.p.lose()
}

// deliver hands an answer to the goroutine that asked. One that comes too late gives its slot back.
func (l *link) deliver(a answer) {
	l.mu.Lock()
	ask := l.asks[a.ID]
	delete(l.asks, a.ID)
	l.mu.Unlock()
	if ask != nil {
		ask <- a // it has room
		return
	}
	closeDescriptor(a.fd)
	if a.err == nil {
		_ = l.say(&head{Kind: sayDrop, Slot: a.Slot}, nil)
	}
}

func (l *link) say(h *head, tail []byte) error {
	l.saying.Lock()
	defer l.saying.Unlock()
	return l.wire.send(h, tail, l.p.from.cfg.DialTimeout)
}

// unanswered has no descriptor: 0 is one.
var unanswered = answer{fd: -1}

// ask shows the owner a token and waits for the answer.
func (l *link) ask(token []byte) (answer, error) {
	reply := make(chan answer, 1)
	l.mu.Lock()
	l.id++
	id := l.id
	l.asks[id] = reply
	l.mu.Unlock()
	if err := l.say(&head{Kind: sayAsk, ID: id}, token); err != nil {
		return unanswered, l.forget(id, reply, fmt.Errorf("%w: %w", driver.ErrPeerLost, err))
	}
	late := time.NewTimer(l.p.from.cfg.DialTimeout)
	defer late.Stop()
	select {
	case a := <-reply:
		return a, a.err
	case <-l.p.lost:
		return unanswered, l.forget(id, reply, driver.ErrPeerLost)
	case <-l.closing:
		return unanswered, l.forget(id, reply, driver.ErrClosed)
	case <-late.C:
		return unanswered, l.forget(id, reply, fmt.Errorf("the other process does not answer: %w",
			driver.ErrTimeout))
	}
}

// forget gives up on an answer, also on one that has come by now.
func (l *link) forget(id uint32, reply chan answer, err error) error {
	l.mu.Lock()
	delete(l.asks, id)
	l.mu.Unlock()
	select {
	case a := <-reply:
		closeDescriptor(a.fd)
		if a.err == nil {
			_ = l.say(&head{Kind: sayDrop, Slot: a.Slot}, nil)
		}
	default:
	}
	return err
}

// end closes the connection; no batch is under way. It serves a nil link, too.
func (l *link) end() {
	if l == nil {
		return
	}
	l.endOnce.Do(func() {
		l.mu.Lock()
		l.over = true
		l.mu.Unlock()
		close(l.closing)
		l.tasks.Wait()
		_ = l.say(&head{Kind: sayBye}, nil)
		_ = l.wire.conn.Close()
		l.owner.Release()
		l.reader.Wait()
		for _, m := range l.maps {
			// the memory is another's; what ails the device its batches have told
			_ = m.block.Close()
		}
		l.unmapPages()
	})
}

func (l *link) unmapPages() {
	for _, page := range [][]byte{l.users, l.states} {
		if page != nil {
			_ = unix.Munmap(page) // ours, whole: cannot fail
		}
	}
}

// begin starts a use of the mappings, unless the connection ends.
func (l *link) begin(f func()) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.over {
		return false
	}
	l.tasks.Go(f)
	return true
}
