// SPDX-License-Identifier: Apache-2.0

package cuda

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	gpu "github.com/sluicehq/sluice/csrc/cuda"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/hostmem"
	"github.com/sluicehq/sluice/internal/proc"
	"github.com/sluicehq/sluice/internal/session"
)

// link is the importer's side of a connection to another process, whose memory this one uses. The
// owner's side is a client (owner.go), which explains the two shared pages.
type link struct {
	p       *peer
	wire    wire
	owner   proc.Remote
	users   []byte     // this process's page
	states  []byte     // the owner's page, mapped read-only here
	sending sync.Mutex // held to send
	closing chan struct{}
	readers sync.WaitGroup
	tasks   session.Tasks // Import, reopen, and the release of imports
	once    sync.Once     // of end

	mu   sync.Mutex // guards what follows
	asks map[uint32]chan answer
	id   uint32

	mapping sync.Mutex // held to map and unmap; guards what follows
	maps    map[uint64]*mapped
}

// answer is the owner's answer to a token. The receiver must close fd; -1: none.
type answer struct {
	head
	fd  int
	err error
}

// mapped is a block of the other process that is mapped here, for one or more imports.
type mapped struct {
	id      uint64
	block   *gpu.Block
	imports int
}

// farMemory is an import of memory of another process: the owner's slot and the mapping.
type farMemory struct {
	l         *link
	token     []byte
	slot      uint32
	on        *mapped
	once      sync.Once // of its release
	reopening atomic.Bool
}

// connectFar connects to a backend of another process, and exchanges the shared pages with it.
func (b *Backend) connectFar(ctx context.Context, addr []byte) (_ *peer, err error) {
	if !b.cfg.Peers {
		return nil, fmt.Errorf("connect with cuda: no such backend in this process, and without "+
			"Config.Peers it reaches no further: %w", driver.ErrPeerLost)
	}
	ctx, cancel := context.WithTimeout(ctx, b.cfg.DialTimeout)
	defer cancel()
	defer func() {
		if err != nil && ctx.Err() != nil {
			err = fmt.Errorf("%w: %w", driver.ContextError(ctx), err)
		}
		if err != nil {
			err = fmt.Errorf("connect with cuda: %w", err)
		}
	}()
	at, err := socketOf(addr)
	if err != nil {
		return nil, err
	}
	conn, err := new(net.Dialer).DialContext(ctx, at.Net, at.Name)
	if errors.Is(err, unix.ECONNREFUSED) {
		err = fmt.Errorf("%w: %w", driver.ErrPeerLost, err)
	}
	if err != nil {
		return nil, err
	}
	p := &peer{from: b, lost: make(chan struct{})}
	l := &link{p: p, wire: wire{conn: conn.(*net.UnixConn)}, closing: make(chan struct{}),
		asks: map[uint32]chan answer{}, maps: map[uint64]*mapped{}}
	p.far = l
	if err := l.greet(ctx); err != nil {
		_ = conn.Close()
		l.owner.Release()
		unmapPages(l.users, l.states)
		return nil, err
	}
	l.readers.Go(l.listen)
	l.readers.Go(func() { // a child of the owner may hold the other end open
		if l.owner.Wait() == nil {
			_ = conn.Close() // listen ends by it
		}
	})
	if err := b.addPeer(b.peers, p); err != nil {
		return nil, errors.Join(err, p.Close())
	}
	return p, nil
}

func (l *link) greet(ctx context.Context) (err error) {
	stop := context.AfterFunc(ctx, func() { _ = l.wire.conn.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	if l.owner, err = proc.Identify(l.wire.conn); err != nil {
		return err
	}
	page, users, err := hostmem.NewSealed("sluice-cuda-batches", pageBytes, true)
	if err != nil {
		return err
	}
	defer closeDescriptor(page)
	l.users = users
	if err := l.wire.send(&head{Kind: sayHello}, []byte(l.p.from.addr), l.p.from.cfg.DialTimeout,
		page); err != nil {
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
	if l.states, err = hostmem.MapSealed(theirs, pageBytes, unix.PROT_READ); err != nil {
		return err
	}
	if !stop() {
		return context.Cause(ctx)
	}
	return l.wire.conn.SetDeadline(time.Time{})
}

func unmapPages(pages ...[]byte) {
	for _, page := range pages {
		if page != nil {
			_ = unix.Munmap(page) // a whole mapping: cannot fail
		}
	}
}

// listen reads the owner's packets until the connection ends. Copies on a stream then run to their
// end.
func (l *link) listen() {
	defer l.p.lose()
	defer l.wire.conn.Close()
	for {
		h, tail, fd, err := l.wire.receive()
		if err != nil {
			return
		}
		switch h.Kind {
		case sayAnswer:
			a := answer{h, fd, h.outcome(tail)}
			l.mu.Lock()
			ask := l.asks[a.ID]
			delete(l.asks, a.ID)
			l.mu.Unlock()
			if ask == nil {
				l.refuseAnswer(&a)
				continue
			}
			ask <- a // buffered: does not block
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

func (l *link) say(h *head, tail []byte) error {
	l.sending.Lock()
	defer l.sending.Unlock()
	return l.wire.send(h, tail, l.p.from.cfg.DialTimeout)
}

// ask sends the owner a token and waits for the answer.
func (l *link) ask(token []byte) (a answer, err error) {
	reply := make(chan answer, 1)
	l.mu.Lock()
	l.id++
	id := l.id
	l.asks[id] = reply
	l.mu.Unlock()
	if err = l.say(&head{Kind: sayAsk, ID: id}, token); err != nil {
		err = fmt.Errorf("%w: %w", driver.ErrPeerLost, err)
	} else {
		late := time.NewTimer(l.p.from.cfg.DialTimeout)
		defer late.Stop()
		select {
		case a = <-reply:
			return a, a.err
		case <-l.p.lost:
			err = driver.ErrPeerLost
		case <-l.closing:
			err = driver.ErrClosed
		case <-late.C:
			err = fmt.Errorf("the other process does not answer: %w", driver.ErrTimeout)
		}
	}
	l.mu.Lock()
	delete(l.asks, id)
	l.mu.Unlock()
	select {
	case a = <-reply: // it has come meanwhile
		l.refuseAnswer(&a)
	default:
	}
	return answer{fd: -1}, err // 0 would be a valid descriptor
}

// refuseAnswer frees the slot of an answer that came too late.
func (l *link) refuseAnswer(a *answer) {
	closeDescriptor(a.fd)
	if a.err == nil {
		_ = l.say(&head{Kind: sayDrop, Slot: a.Slot}, nil)
	}
}

// importFar is Import for a peer of another process. It runs as a task, so that Close waits for it.
func (p *peer) importFar(token []byte) (key uint32, size uint64, err error) {
	done := make(chan struct{})
	var r *remote
	if !p.far.tasks.Start(func() {
		defer close(done)
		if r, err = p.far.open(token); err != nil {
			return
		}
		p.entry.RLock()
		defer p.entry.RUnlock()
		if err = driver.ErrClosed; !p.closed { // else end unmaps everything
			key, err = p.addImport(r)
		}
	}) {
		return 0, 0, driver.ErrClosed
	}
	if <-done; err != nil {
		return 0, 0, fmt.Errorf("import device memory of another process: %w", err)
	}
	return key, r.m.seg.Len, nil
}

// open sends a token to the owner, and maps the memory unless its block is mapped already.
func (l *link) open(token []byte) (*remote, error) {
	if len(token) > driver.TokenMax {
		return nil, driver.ErrBadToken
	}
	a, err := l.ask(token)
	defer closeDescriptor(a.fd)
	if err != nil {
		return nil, err
	}
	m, on, err := l.attach(&a)
	if err != nil {
		_ = l.say(&head{Kind: sayDrop, Slot: a.Slot}, nil)
		return nil, err
	}
	shared := &slotWords{users: hostmem.SharedWord(l.users, int(8*a.Slot)),
		state: hostmem.SharedWord(l.states,
			int(8*a.Slot))}
	return &remote{m: m, grant: &grant{far: shared},
		far: &farMemory{l: l, token: slices.Clone(token), slot: a.Slot, on: on}}, nil
}

func (l *link) attach(a *answer) (*memory, *mapped, error) {
	if a.Slot >= slotsMax || a.Size == 0 || a.Off > a.Mapped || a.Size > a.Mapped-a.Off ||
		a.fd < 0 {
		return nil, nil, fmt.Errorf("%d bytes at %d of %d in slot %d: %w", a.Size, a.Off, a.Mapped,
			a.Slot, driver.ErrCorrupt)
	}
	b := l.p.from
	i := slices.IndexFunc(b.devices, func(d *device) bool { return d.uuid == a.Device })
	if i < 0 {
		return nil, nil, fmt.Errorf("memory of a device that this process, or Config.Devices, "+
			"leaves out: %w", driver.ErrNotSupported)
	}
	d := b.devices[i]
	l.mapping.Lock()
	defer l.mapping.Unlock()
	on := l.maps[a.Block]
	if on == nil {
		block, err := gpu.ImportBlock(d.ordinal, a.fd, a.Mapped)
		if err != nil {
			return nil, nil, err
		}
		on = &mapped{id: a.Block, block: block}
		l.maps[a.Block] = on
	}
	if on.block.Len != a.Mapped {
		return nil, nil, fmt.Errorf("a block of %d bytes that had %d: %w", a.Mapped, on.block.Len,
			driver.ErrCorrupt)
	}
	on.imports++
	seg := driver.Segment{Kind: driver.HBM, Len: a.Size, Addr: on.block.At + a.Off,
		Device: d.ordinal, ReadOnly: a.ReadOnly != 0}
	return &memory{b: b, seg: seg, base: seg.Addr, dev: d}, on, nil
}

// refused returns the reason why an import takes no batch. If the owner has replaced the memory, or
// is doing so, refused starts to import the new memory and returns ErrFull: the batch may begin
// once that is done.
func (p *peer) refused(key uint32, r *remote) error {
	if r.far == nil || r.grant.ended.Load() || r.grant.far.state.Load() < importMoving {
		return driver.ErrRevoked
	}
	if r.far.reopening.CompareAndSwap(false, true) &&
		!p.far.tasks.Start(func() { p.reopen(key, r) }) {
		return driver.ErrClosed
	}
	return driver.ErrFull
}

// reopen sends the token again until the owner has replaced the memory. Then it makes the key name
// the new import, unless the key was dropped meanwhile.
func (p *peer) reopen(key uint32, r *remote) {
	defer p.from.hasRoom()
	late := time.Now().Add(p.from.cfg.DialTimeout)
	fresh, err := p.far.open(r.far.token)
	for pause := time.Millisecond; errors.Is(err, driver.ErrFull) &&
		time.Now().Before(late); pause *= 2 {
		select {
		case <-time.After(pause):
			fresh, err = p.far.open(r.far.token)
		case <-p.far.closing:
			err = driver.ErrClosed
		}
	}
	switch {
	case err == nil:
		p.mu.Lock()
		defer p.mu.Unlock()
		if p.imports.Replace(key, r, fresh) {
			r.forget()
			return
		}
		fresh.forget()
	case errors.Is(err, driver.ErrTimeout), errors.Is(err, driver.ErrFull):
		r.far.reopening.Store(false) // the next Submit tries again
	default:
		r.grant.end()
	}
}

// forget ends an import, once the last batch that uses it has ended.
func (r *remote) forget() {
	if r.far == nil {
		return
	}
	r.grant.end()
	r.far.releaseIfUnused(r.grant)
}

// releaseIfUnused gives the import back to the owner if it was forgotten and no batch uses it. A
// task does that, since unmapping may wait for the device and must not delay the caller, which may
// be completing a batch.
func (f *farMemory) releaseIfUnused(g *grant) {
	if f == nil || !g.ended.Load() || !g.quiet() {
		return
	}
	f.once.Do(func() {
		f.l.tasks.Start(func() {
			_ = f.l.say(&head{Kind: sayDrop, Slot: f.slot}, nil)
			f.l.mapping.Lock()
			defer f.l.mapping.Unlock()
			if f.on.imports--; f.on.imports == 0 {
				delete(f.l.maps, f.on.id)
				_ = f.on.block.Close() // an error does not concern this process's memory
			}
		})
	})
}

// end closes the connection. No batch is running. A nil link does nothing.
func (l *link) end() {
	if l == nil {
		return
	}
	l.once.Do(func() {
		close(l.closing)
		l.tasks.Wait()
		_ = l.say(&head{Kind: sayBye}, nil)
		_ = l.wire.conn.Close()
		l.owner.Release()
		l.readers.Wait()
		for _, m := range l.maps {
			// an error does not concern this process's memory; a fault of the device has failed
			// the batches
			_ = m.block.Close()
		}
		unmapPages(l.users, l.states)
	})
}
