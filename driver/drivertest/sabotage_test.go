// SPDX-License-Identifier: Apache-2.0

package drivertest

import (
	"context"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sluicehq/sluice/backends/mem"
	"github.com/sluicehq/sluice/backends/shm"
	"github.com/sluicehq/sluice/driver"
)

// sabotage says where a good backend is made a bad one. What is nil stays good.
type sabotage struct {
	caps     func(b *saboteur) driver.Caps
	fd       func(b *saboteur) int
	register func(b *saboteur, seg driver.Segment) (driver.Memory, error)
	connect  func(b *saboteur, ctx context.Context, addr []byte) (driver.Peer, error)
	poll     func(b *saboteur, done []driver.Completion) (int, error)
	closing  func(b *saboteur) error
	receive  func(b *saboteur, msgs []driver.Message) (int, error)
	arm      func(b *saboteur) (bool, error)
	revoke   func(m *saboteurMemory, ctx context.Context) error
	answer   func(b *saboteur, conn uint64, msg []byte) error

	imports func(p *saboteurPeer, token []byte) (uint32, uint64, error)
	drop    func(p *saboteurPeer, key uint32)
	submit  func(p *saboteurPeer, tag uint64, b *driver.Batch) error // of descriptors alone
	pattern func(p *saboteurPeer, tag uint64, b *driver.Batch) error // of a pattern
	// of descriptors with a message
	notify    func(p *saboteurPeer, tag uint64, b *driver.Batch) error
	any       func(p *saboteurPeer, tag uint64, b *driver.Batch) error // all of those
	cancel    func(p *saboteurPeer, tag uint64)
	help      func(p *saboteurPeer, tag uint64, stop <-chan struct{}) bool
	closePeer func(p *saboteurPeer) error
	can       func(p *saboteurPeer) driver.Can
	conn      func(p *saboteurPeer) uint64
	lost      func(p *saboteurPeer) <-chan struct{}
	explain   func(p *saboteurPeer, local, remote uint32) string
}

// saboteur is a backend under sabotage. It remembers what it needs for misdeeds.
type saboteur struct {
	driver.Backend
	how sabotage

	mu      sync.Mutex
	count   int                       // of the calls that only sometimes go wrong
	stash   []driver.Completion       // to be delivered by the next Poll
	flights map[uint64]flight         // by tag
	mapped  map[uint32]driver.Segment // by key
	late    sync.WaitGroup            // misdeeds under way
	buf     []byte                    // of a receiver that reuses it
	again   []driver.Message          // to be received once more
	lazy    []func() error            // to be done by the next Poll
}

type flight struct {
	p *saboteurPeer
	driver.Batch

	stages stages // passed so far
}

// stages are moments in the life of a batch that a misdeed follows. It follows
// them and not a clock, which goes slower or faster than the machine.
type stages uint8

const (
	helped stages = 1 << iota // somebody offered help
	ended                     // Poll has it as aborted, or Close of its peer returned
)

type saboteurPeer struct {
	driver.Peer
	b     *saboteur
	mu    sync.Mutex
	seen  map[uint32]driver.Segment // the peer's memory by imported key
	known map[string]uint32         // imported keys by token
}

// secrets finds registered memory by what its token begins with: how a saboteur
// writes where it must not.
var secrets sync.Map // [16]byte to driver.Segment

// sabotaged is mem under sabotage.
func sabotaged(how sabotage) Harness {
	return Harness{
		Name:   "sabotaged",
		Limit:  250 * time.Millisecond,
		Local:  lastingMemory,
		Remote: lastingMemory,
		Guards: true,
		New: func() (driver.Backend, error) {
			b, err := mem.New(mem.Config{BatchesMax: 64})
			if err != nil {
				return nil, err
			}
			return sabotageOf(b, how), nil
		},
	}
}

// sabotagedShm is shm under sabotage on the near side; the second process has
// shm as it is. With late the limit is one that passes soon.
func sabotagedShm(how sabotage, late bool) Harness {
	h := shmHarness
	if late {
		h.Limit = 700 * time.Millisecond
	}
	h.New = func() (driver.Backend, error) {
		b, err := shm.New(shm.Config{})
		if err != nil {
			return nil, err
		}
		return sabotageOf(b, how), nil
	}
	return h
}

func sabotageOf(b driver.Backend, how sabotage) *saboteur {
	return &saboteur{
		Backend: b, how: how,
		flights: map[uint64]flight{}, mapped: map[uint32]driver.Segment{},
	}
}

// pending counts the misdeeds, of all saboteurs, that are to come.
var pending atomic.Int64

// lastingMemory stays mapped for a while after it was freed, and while a misdeed is to come, so
// that a late write is found by the check and not by the kernel.
func lastingMemory(n uint64) (*Space, error) {
	space, err := ForeignMemory(n)
	if err != nil {
		return nil, err
	}
	unmap := space.Free
	space.Free = func() error {
		var end func()
		end = func() {
			if pending.Load() > 0 {
				time.AfterFunc(time.Second, end)
				return
			}
			_ = unmap()
		}
		time.AfterFunc(time.Second, end)
		return nil
	}
	return space, nil
}

func (b *saboteur) Caps() driver.Caps {
	if b.how.caps != nil {
		return b.how.caps(b)
	}
	return b.Backend.Caps()
}

func (b *saboteur) FD() int {
	if b.how.fd != nil {
		return b.how.fd(b)
	}
	return b.Backend.FD()
}

func (b *saboteur) Register(seg driver.Segment) (driver.Memory, error) {
	secrets.Store(seg.Secret, seg)
	if b.how.register != nil {
		return b.how.register(b, seg)
	}
	m, err := b.Backend.Register(seg)
	if err != nil {
		return nil, err
	}
	b.mu.Lock()
	b.mapped[m.Key()] = seg
	b.mu.Unlock()
	return &saboteurMemory{Memory: m, b: b, seg: seg}, nil
}

func (b *saboteur) Connect(ctx context.Context, addr []byte) (driver.Peer, error) {
	if b.how.connect != nil {
		return b.how.connect(b, ctx, addr)
	}
	return b.dial(ctx, addr)
}

func (b *saboteur) dial(ctx context.Context, addr []byte) (driver.Peer, error) {
	p, err := b.Backend.Connect(ctx, addr)
	if err != nil {
		return nil, err
	}
	return &saboteurPeer{Peer: p, b: b, seen: map[uint32]driver.Segment{},
		known: map[string]uint32{}}, nil
}

func (b *saboteur) Poll(done []driver.Completion) (int, error) {
	if b.how.poll != nil {
		return b.how.poll(b, done)
	}
	return b.Backend.Poll(done)
}

func (b *saboteur) Receive(msgs []driver.Message) (int, error) {
	if b.how.receive != nil {
		return b.how.receive(b, msgs)
	}
	return b.Backend.Receive(msgs)
}

func (b *saboteur) Arm() (bool, error) {
	if b.how.arm != nil {
		return b.how.arm(b)
	}
	return b.Backend.Arm()
}

// saboteurMemory is a memory that may be revoked in another way.
type saboteurMemory struct {
	driver.Memory
	b    *saboteur
	seg  driver.Segment
	done atomic.Bool // for a misdeed
}

func (m *saboteurMemory) Revoke(ctx context.Context) error {
	if m.b.how.revoke != nil {
		return m.b.how.revoke(m, ctx)
	}
	return m.Memory.Revoke(ctx)
}

func (b *saboteur) Close() error {
	if b.how.closing != nil {
		return b.how.closing(b)
	}
	err := b.Backend.Close()
	b.late.Wait()
	return err
}

// every reports true on each nth call.
func (b *saboteur) every(n int) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.count++
	return b.count%n == 0
}

// later does a misdeed after a while.
func (b *saboteur) later(d time.Duration, f func()) {
	b.late.Add(1)
	pending.Add(1)
	time.AfterFunc(d, func() {
		defer pending.Add(-1)
		defer b.late.Done()
		f()
	})
}

// land copies what a batch names, whatever its fate was, where that is memory.
func (f flight) land() {
	for _, d := range f.Descs {
		f.p.b.mu.Lock()
		local := f.p.b.mapped[d.LocalKey].Mem
		f.p.b.mu.Unlock()
		f.p.mu.Lock()
		remote := f.p.seen[d.RemoteKey].Mem
		f.p.mu.Unlock()
		if uint64(len(local)) < d.Local+d.Len || uint64(len(remote)) < d.Remote+d.Len {
			continue
		}
		local, remote = local[d.Local:][:d.Len], remote[d.Remote:][:d.Len]
		if f.Op == driver.Write {
			copy(remote, local)
		} else {
			copy(local, remote)
		}
	}
}

func (p *saboteurPeer) Import(token []byte) (uint32, uint64, error) {
	if p.b.how.imports != nil {
		return p.b.how.imports(p, token)
	}
	return p.admit(token)
}

func (p *saboteurPeer) admit(token []byte) (uint32, uint64, error) {
	key, size, err := p.Peer.Import(token)
	if err == nil {
		if seg, ok := secrets.Load([16]byte(token[:16])); ok { // not another process's
			p.mu.Lock()
			p.seen[key] = seg.(driver.Segment)
			p.mu.Unlock()
		}
	}
	return key, size, err
}

func (p *saboteurPeer) Drop(key uint32) {
	if p.b.how.drop != nil {
		p.b.how.drop(p, key)
		return
	}
	p.Peer.Drop(key)
}

func (p *saboteurPeer) Submit(tag uint64, b *driver.Batch) error {
	how := p.b.how.any
	switch {
	case how != nil:
	case b.Pattern != nil:
		how = p.b.how.pattern
	case b.Tail == driver.NotifyTail:
		how = p.b.how.notify
	case b.Tail == driver.NoTail && !b.Durable:
		how = p.b.how.submit
	}
	if how != nil {
		return how(p, tag, b)
	}
	return p.Peer.Submit(tag, b)
}

func (p *saboteurPeer) Can() driver.Can {
	if p.b.how.can != nil {
		return p.b.how.can(p)
	}
	return p.Peer.Can()
}

func (p *saboteurPeer) Conn() uint64 {
	if p.b.how.conn != nil {
		return p.b.how.conn(p)
	}
	return p.Peer.Conn()
}

func (b *saboteur) Answer(conn uint64, msg []byte) error {
	if b.how.answer != nil {
		return b.how.answer(b, conn, msg)
	}
	return b.Backend.Answer(conn, msg)
}

func (p *saboteurPeer) Cancel(tag uint64) {
	if p.b.how.cancel != nil {
		p.b.how.cancel(p, tag)
		return
	}
	p.Peer.Cancel(tag)
}

func (p *saboteurPeer) Help(tag uint64, stop <-chan struct{}) bool {
	if p.b.how.help != nil {
		return p.b.how.help(p, tag, stop)
	}
	return p.Peer.Help(tag, stop)
}

func (p *saboteurPeer) Lost() <-chan struct{} {
	if p.b.how.lost != nil {
		return p.b.how.lost(p)
	}
	return p.Peer.Lost()
}

func (p *saboteurPeer) Explain(local, remote uint32) string {
	if p.b.how.explain != nil {
		return p.b.how.explain(p, local, remote)
	}
	return p.Peer.Explain(local, remote)
}

func (p *saboteurPeer) Close() error {
	if p.b.how.closePeer != nil {
		return p.b.how.closePeer(p)
	}
	return p.Peer.Close()
}

// remember keeps a batch by its tag.
func (p *saboteurPeer) remember(tag uint64, b *driver.Batch) {
	f := flight{p: p, Batch: copied(b)}
	p.b.mu.Lock()
	p.b.flights[tag] = f
	p.b.mu.Unlock()
}

// copied is a batch whose descriptors and message are its own.
func copied(b *driver.Batch) driver.Batch {
	c := *b
	c.Descs, c.Notify = slices.Clone(b.Descs), slices.Clone(b.Notify)
	return c
}

func (b *saboteur) recall(tag uint64) (flight, bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	f, ok := b.flights[tag]
	return f, ok
}
