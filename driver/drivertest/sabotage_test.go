// SPDX-License-Identifier: Apache-2.0

package drivertest

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/backends/mem"
	"github.com/sluicehq/sluice/backends/shm"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/testing/testkit"
)

// sabotage breaks a promise of a backend that keeps it. What is nil stays good.
type sabotage struct {
	submit   func(p *badPeer, tag uint64, b *driver.Batch) error
	poll     func(b *bad, done []driver.Completion) (int, error)
	receive  func(b *bad, msgs []driver.Message) (int, error)
	arm      func(b *bad) (bool, error)
	revoke   func(m driver.Memory, ctx context.Context) error
	register func(b *bad, seg driver.Segment) (driver.Memory, error)
	imports  func(p *badPeer, token []byte) (uint32, uint64, error)
	drop     func(p *badPeer, key uint32)
	cancel   func(p *badPeer, tag uint64)
	help     func(p *badPeer, tag uint64, stop <-chan struct{}) bool
	lose     func(p *badPeer) error // Close of a Peer
	lost     func(p *badPeer) <-chan struct{}
	connect  func(b *bad, ctx context.Context, addr []byte) (driver.Peer, error)
	answer   func(b *bad, conn uint64, msg []byte) error
	caps     func(c *driver.Caps)
	can      driver.Can
}

// bad is a backend under sabotage, with what that needs.
type bad struct {
	driver.Backend
	how sabotage

	mu        sync.Mutex
	count     int
	stash     []driver.Completion // for the next Poll
	lazy      []func()            // for the next Poll
	sent      map[uint64]sent     // by tag
	locals    map[uint32]driver.Segment
	missing   bool
	late      sync.WaitGroup
	kept      []int // descriptors
	datagrams *net.UnixConn
	leases    map[driver.Shared][]driver.Memory
}

type sent struct {
	p *badPeer
	b driver.Batch
}

type badPeer struct {
	driver.Peer
	b       *bad
	remotes sync.Map // uint32: driver.Segment
	tokens  sync.Map // uint32: []byte
}

// secrets finds registered memory by what its token begins with: so a bad peer writes where it must
// not.
var secrets sync.Map

// pending counts what is done late.
var pending atomic.Int64

func (b *bad) later(f func()) {
	pending.Add(1)
	b.late.Add(1)
	time.AfterFunc(5*time.Millisecond, func() {
		defer pending.Add(-1)
		defer b.late.Done()
		f()
	})
}

func (b *bad) every(n int) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.count++
	return b.count%n == 0
}

// land moves the bytes of a batch past the backend.
func (s sent) land() {
	for _, d := range s.b.Descs {
		s.p.b.mu.Lock()
		local := s.p.b.locals[d.LocalKey].Mem
		s.p.b.mu.Unlock()
		seg, ok := s.p.remotes.Load(d.RemoteKey)
		if !ok {
			continue
		}
		remote := seg.(driver.Segment).Mem
		if s.b.Op == driver.Write {
			copy(remote[d.Remote:][:d.Len], local[d.Local:])
		} else {
			copy(local[d.Local:][:d.Len], remote[d.Remote:])
		}
	}
}

func (b *bad) recall(tag uint64) (sent, bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	s, ok := b.sent[tag]
	return s, ok
}

func (b *bad) Caps() driver.Caps {
	c := b.Backend.Caps()
	if b.how.caps != nil {
		b.how.caps(&c)
	}
	return c
}

func (b *bad) Register(seg driver.Segment) (driver.Memory, error) {
	secrets.Store(seg.Secret, seg)
	if b.how.register != nil {
		return b.how.register(b, seg)
	}
	m, err := b.Backend.Register(seg)
	if err == nil {
		b.mu.Lock()
		b.locals[m.Key()] = seg
		b.mu.Unlock()
	}
	if err == nil && b.how.revoke != nil {
		m = &badMemory{m, b.how.revoke}
	}
	return m, err
}

func (b *bad) Connect(ctx context.Context, addr []byte) (driver.Peer, error) {
	if b.how.connect != nil {
		return b.how.connect(b, ctx, addr)
	}
	return b.dial(ctx, addr)
}

func (b *bad) dial(ctx context.Context, addr []byte) (driver.Peer, error) {
	p, err := b.Backend.Connect(ctx, addr)
	if err != nil {
		return nil, err
	}
	return &badPeer{Peer: p, b: b}, nil
}

func (b *bad) Poll(done []driver.Completion) (int, error) {
	b.mu.Lock()
	lazy, n := b.lazy, copy(done, b.stash)
	b.lazy, b.stash = nil, b.stash[n:]
	b.mu.Unlock()
	for _, f := range lazy {
		f()
	}
	if n > 0 {
		return n, nil
	}
	if b.how.poll != nil {
		return b.how.poll(b, done)
	}
	return b.Backend.Poll(done)
}

func (b *bad) Receive(msgs []driver.Message) (int, error) {
	if b.how.receive != nil {
		return b.how.receive(b, msgs)
	}
	return b.Backend.Receive(msgs)
}

func (b *bad) Arm() (bool, error) {
	if b.how.arm != nil {
		return b.how.arm(b)
	}
	return b.Backend.Arm()
}

func (b *bad) Answer(conn uint64, msg []byte) error {
	if b.how.answer != nil {
		return b.how.answer(b, conn, msg)
	}
	return b.Backend.Answer(conn, msg)
}

// unentered is memory whose Renew does not know what lands in it.
type unentered struct{ driver.Shared }

func (unentered) Enter()         {}
func (unentered) TryEnter() bool { return true }
func (unentered) Leave()         {}

// badMemory is revoked otherwise.
type badMemory struct {
	driver.Memory
	how func(m driver.Memory, ctx context.Context) error
}

func (m *badMemory) Revoke(ctx context.Context) error { return m.how(m.Memory, ctx) }

func (b *bad) Close() error {
	err := b.Backend.Close()
	b.late.Wait()
	for _, fd := range b.kept {
		_ = unix.Close(fd)
	}
	b.kept = nil
	if b.datagrams != nil {
		_ = b.datagrams.Close()
	}
	return err
}

func (p *badPeer) Can() driver.Can { return p.Peer.Can() | p.b.how.can }

func (p *badPeer) Import(token []byte) (uint32, uint64, error) {
	if p.b.how.imports != nil {
		return p.b.how.imports(p, token)
	}
	return p.admit(token)
}

func (p *badPeer) admit(token []byte) (uint32, uint64, error) {
	key, size, err := p.Peer.Import(token)
	if err == nil {
		p.tokens.Store(key, token)
		if seg, ok := secrets.Load([16]byte(token[:16])); ok {
			p.remotes.Store(key, seg)
		}
	}
	return key, size, err
}

func (p *badPeer) Drop(key uint32) {
	if p.b.how.drop != nil {
		p.b.how.drop(p, key)
		return
	}
	p.Peer.Drop(key)
}

func (p *badPeer) Submit(tag uint64, b *driver.Batch) error {
	p.b.mu.Lock()
	p.b.sent[tag] = sent{p, copied(b)}
	p.b.mu.Unlock()
	if p.b.how.submit != nil {
		return p.b.how.submit(p, tag, b)
	}
	return p.Peer.Submit(tag, b)
}

func (p *badPeer) Cancel(tag uint64) {
	if p.b.how.cancel != nil {
		p.b.how.cancel(p, tag)
		return
	}
	p.Peer.Cancel(tag)
}

func (p *badPeer) Help(tag uint64, stop <-chan struct{}) bool {
	if p.b.how.help != nil {
		return p.b.how.help(p, tag, stop)
	}
	return p.Peer.Help(tag, stop)
}

func (p *badPeer) Lost() <-chan struct{} {
	if p.b.how.lost != nil {
		return p.b.how.lost(p)
	}
	return p.Peer.Lost()
}

func (p *badPeer) Close() error {
	if p.b.how.lose != nil {
		return p.b.how.lose(p)
	}
	return p.Peer.Close()
}

func copied(b *driver.Batch) driver.Batch {
	c := *b
	c.Descs, c.Notify = slices.Clone(b.Descs), slices.Clone(b.Notify)
	return c
}

// changing submits a batch of which each descriptor, and the pattern, is another.
func changing(f func(*driver.Desc), g func(*driver.Pattern)) sabotage {
	return sabotage{submit: func(p *badPeer, tag uint64, b *driver.Batch) error {
		c := copied(b)
		for i := range c.Descs {
			f(&c.Descs[i])
		}
		if b.Pattern != nil {
			p := *b.Pattern
			g(&p)
			c.Pattern = &p
		}
		return p.Peer.Submit(tag, &c)
	}}
}

// pollHidden hides the completions of batches that a sabotage has submitted.
func pollHidden(b *bad, done []driver.Completion) (int, error) {
	n, err := b.Backend.Poll(done[:1])
	if n == 1 && done[0].Tag < firstTag/2 {
		return 0, err
	}
	return n, err
}

// onError is told of completions with an error.
func onError(f func(b *bad, c *driver.Completion)) sabotage {
	return sabotage{poll: func(b *bad, done []driver.Completion) (int, error) {
		n, err := b.Backend.Poll(done)
		for i := range done[:n] {
			if done[i].Err != nil {
				f(b, &done[i])
			}
		}
		return n, err
	}}
}

var sabotages = []struct {
	name   string
	checks string
	how    sabotage
}{
	{"a write lands behind a revoke", "RevokeUnderWrites",
		onError(func(b *bad, c *driver.Completion) {
			if s, ok := b.recall(c.Tag); ok && errors.Is(c.Err, driver.ErrRevoked) {
				b.later(s.land)
			}
		})},
	{"a batch lands behind a cancel", "Cancel", onError(func(b *bad, c *driver.Completion) {
		if s, ok := b.recall(c.Tag); ok && errors.Is(c.Err, driver.ErrAborted) {
			b.later(s.land)
		}
	})},
	{"a write lands behind Close", "PeerClose", sabotage{lose: func(p *badPeer) error {
		p.b.mu.Lock()
		for _, s := range p.b.sent {
			p.b.later(s.land)
		}
		p.b.mu.Unlock()
		return p.Peer.Close()
	}}},
	{"completes twice", "Lengths Load Random Full", sabotage{
		poll: func(b *bad, done []driver.Completion) (int, error) {
			n, err := b.Backend.Poll(done)
			if n > 0 && b.every(5) {
				b.mu.Lock()
				b.stash = append(b.stash, done[0])
				b.mu.Unlock()
			}
			return n, err
		}}},
	{"never completes", "Load Full Drop", sabotage{
		poll: func(b *bad, done []driver.Completion) (int, error) {
			n, err := b.Backend.Poll(done)
			if n > 0 && b.every(3) {
				n--
			}
			return n, err
		}}},
	{"completes before its bytes", "Lengths MessageBehindItsBytes NotKept Random", sabotage{
		submit: func(p *badPeer, tag uint64, b *driver.Batch) error {
			c := copied(b)
			for i := range c.Descs {
				c.Descs[i].Len = 1
			}
			if err := p.Peer.Submit(tag, &c); err != nil {
				return err
			}
			s, _ := p.b.recall(tag)
			p.b.later(s.land)
			return nil
		}}},
	{"moves nothing until it is polled", "NoPoll", sabotage{
		submit: func(p *badPeer, tag uint64, b *driver.Batch) error {
			c := copied(b)
			p.b.mu.Lock()
			defer p.b.mu.Unlock()
			p.b.lazy = append(p.b.lazy, func() { _ = p.Peer.Submit(tag, &c) })
			return nil
		}}},
	{"a byte beside the range", "Lengths ManyDescriptors Patterns Random",
		changing(func(d *driver.Desc) { d.Len++ }, func(p *driver.Pattern) { p.Run++ })},
	{"other bytes", "Lengths Load Help CancelNothing Drop WakeCompletion",
		changing(func(d *driver.Desc) { d.Len = max(1, d.Len-1) }, func(*driver.Pattern) {})},
	{"pieces that touch on one side are taken for one", "ManyDescriptors", sabotage{
		submit: func(p *badPeer, tag uint64, b *driver.Batch) error {
			c := *b
			c.Descs = nil
			for _, d := range b.Descs {
				if n := len(c.Descs) - 1; n >= 0 && c.Descs[n].RemoteKey == d.RemoteKey &&
					c.Descs[n].Local+c.Descs[n].Len == d.Local {
					c.Descs[n].Len += d.Len
				} else {
					c.Descs = append(c.Descs, d)
				}
			}
			return p.Peer.Submit(tag, &c)
		}}},
	{"lands beside a Renew", "Renew", sabotage{
		register: func(b *bad, seg driver.Segment) (driver.Memory, error) {
			if seg.Shared != nil {
				seg.Shared = unentered{seg.Shared}
			}
			return b.Backend.Register(seg)
		}}},
	{"bounds are the memory's that it is a part of", "Bounds", sabotage{
		submit: func(p *badPeer, tag uint64, b *driver.Batch) error {
			err := p.Peer.Submit(tag, b)
			if errors.Is(err, driver.ErrBounds) && len(b.Descs) > 0 {
				return p.Peer.Submit(tag, messageAlone(nil))
			}
			return err
		}}},
	{"any key is the first", "Keys", changing(func(d *driver.Desc) { d.RemoteKey = 0 },
		func(*driver.Pattern) {})},
	{"takes what it has no bit for", "Can", sabotage{
		submit: func(p *badPeer, tag uint64, b *driver.Batch) error {
			c := *b
			c.Durable = false
			return p.Peer.Submit(tag, &c)
		}}},
	{"peers reach all of a memory", "Only", sabotage{
		register: func(b *bad, seg driver.Segment) (driver.Memory, error) {
			seg.Only = nil
			return b.Backend.Register(seg)
		}}},
	{"a list that changes leads anywhere", "PatternChanges", sabotage{
		submit: func(p *badPeer, tag uint64, b *driver.Batch) error {
			s, _ := p.b.recall(tag)
			if b.Pattern != nil {
				s.b = driver.Batch{Op: b.Op, Descs: []driver.Desc{b.Pattern.Desc(0)}}
				s.b.Descs[0].Len = 100
				s.b.Descs[0].Local = 0
				p.b.later(s.land)
			}
			return p.Peer.Submit(tag, b)
		}}},
	{"says nothing of a fault", "Faults", onError(func(_ *bad, c *driver.Completion) {
		if errors.Is(c.Err, driver.ErrFault) {
			c.Err = nil
		}
	})},
	{"allocates", "NoAllocation", sabotage{submit: func(p *badPeer, tag uint64,
		b *driver.Batch) error {
		c := copied(b)
		return p.Peer.Submit(tag, &c)
	}}},
	{"reads a batch after Submit", "NotKept", sabotage{submit: func(p *badPeer, tag uint64,
		b *driver.Batch) error {
		p.b.later(func() { _ = p.Peer.Submit(tag, b) })
		return nil
	}}},
	{"a message before its bytes", "MessageBehindItsBytes", sabotage{
		submit: func(p *badPeer, tag uint64, b *driver.Batch) error {
			if b.Tail == driver.NoTail || len(b.Descs) == 0 {
				return p.Peer.Submit(tag, b)
			}
			c := copied(b)
			c.Tail, c.Notify = driver.NoTail, nil
			if err := p.Peer.Submit(^tag, messageAlone(b.Notify)); err != nil {
				return err
			}
			p.b.later(func() {
				for errors.Is(p.Peer.Submit(tag, &c), driver.ErrFull) {
				}
			})
			return nil
		},
		poll: pollHidden}},
	{"messages out of order", "MessageOrder MessageBackPressure Answers", sabotage{
		receive: func(b *bad, msgs []driver.Message) (int, error) {
			n, err := b.Backend.Receive(msgs)
			if n > 1 {
				msgs[0], msgs[1] = msgs[1], msgs[0]
			}
			return n, err
		}}},
	{"the message of a batch that failed", "MessageOfFailed Cancel", sabotage{
		poll: func(b *bad, done []driver.Completion) (int, error) {
			n, err := pollHidden(b, done)
			if s, ok := b.recall(done[0].Tag); n == 1 && ok && done[0].Err != nil &&
				s.b.Tail != driver.NoTail {
				_ = s.p.Peer.Submit(^done[0].Tag, messageAlone(s.b.Notify))
			}
			return n, err
		}}},
	{"no last message", "LastMessage Answers", sabotage{
		receive: func(b *bad, msgs []driver.Message) (int, error) {
			n, err := b.Backend.Receive(msgs)
			if n > 0 && msgs[n-1].Err != nil {
				n--
			}
			return n, err
		}}},
	{"answers by another connection", "Answers PingPong", sabotage{
		answer: func(b *bad, conn uint64, msg []byte) error {
			return b.Backend.Answer(conn, append([]byte("x"), msg...))
		}}},
	{"takes a token behind its revoke", "Revoke", noRevoke},
	{"does not look at the secret", "Tokens", sabotage{
		imports: func(p *badPeer, token []byte) (key uint32, size uint64, err error) {
			err = driver.ErrBadToken
			secrets.Range(func(secret, _ any) bool {
				if s := secret.([16]byte); len(token) > 16 {
					key, size, err = p.Peer.Import(append(s[:], token[16:]...))
				}
				return err != nil
			})
			return key, size, err
		}}},
	{"full for ever", "Full MessageBackPressure", sabotage{
		submit: func(p *badPeer, tag uint64, b *driver.Batch) error {
			p.b.mu.Lock()
			full := p.b.missing
			p.b.mu.Unlock()
			if full {
				return driver.ErrFull
			}
			err := p.Peer.Submit(tag, b)
			p.b.mu.Lock()
			p.b.missing = errors.Is(err, driver.ErrFull)
			p.b.mu.Unlock()
			return err
		}}},
	{"no wake-ups", "WakeMessage", sabotage{
		arm: func(b *bad) (bool, error) { return false, nil }}},
	{"a lost wake-up", "WakeCompletion PingPong", sabotage{
		arm: func(b *bad) (bool, error) {
			if b.every(4) {
				return false, nil
			}
			return b.Backend.Arm()
		}}},
	{"durable without a sync", "Durable", sabotage{can: driver.CanDurable,
		submit: func(p *badPeer, tag uint64, b *driver.Batch) error {
			c := *b
			c.Durable = false
			return p.Peer.Submit(tag, &c)
		}}},
	{"cancels every batch", "CancelNothing", sabotage{cancel: func(p *badPeer, _ uint64) {
		p.b.mu.Lock()
		defer p.b.mu.Unlock()
		for tag := range p.b.sent {
			p.Peer.Cancel(tag)
		}
	}}},
	{"ends batches whose key is dropped", "Drop", sabotage{drop: func(p *badPeer, key uint32) {
		p.b.mu.Lock()
		for tag := range p.b.sent {
			p.Peer.Cancel(tag)
		}
		p.b.mu.Unlock()
		p.Peer.Drop(key)
	}}},
	{"says that it helped", "Help", sabotage{help: func(p *badPeer, tag uint64,
		stop <-chan struct{}) bool {
		p.Peer.Help(tag, stop)
		return true
	}}},
	{"works behind Close", "BackendClose Together", sabotage{
		register: func(b *bad, seg driver.Segment) (driver.Memory, error) {
			m, err := b.Backend.Register(seg)
			if errors.Is(err, driver.ErrClosed) {
				err = driver.ErrFull
			}
			return m, err
		}}},
	{"takes any address", "Connect", sabotage{
		connect: func(b *bad, ctx context.Context, addr []byte) (driver.Peer, error) {
			p, err := b.dial(ctx, addr)
			if err != nil && ctx.Err() == nil {
				return b.dial(ctx, b.Addr())
			}
			return p, err
		}}},
	{"a connection ends others", "Connect", sabotage{lose: func(p *badPeer) error {
		p.b.mu.Lock()
		defer p.b.mu.Unlock()
		for _, s := range p.b.sent {
			_ = s.p.Peer.Close()
		}
		return p.Peer.Close()
	}}},
	{"keeps a descriptor of each connection", "Churn", sabotage{
		connect: func(b *bad, ctx context.Context, addr []byte) (driver.Peer, error) {
			fd, _ := unix.Eventfd(0, unix.EFD_CLOEXEC)
			b.kept = append(b.kept, fd) // until Close, which no other check waits for
			return b.dial(ctx, addr)
		}}},
	{"has two names", "Churn", sabotage{caps: func(c *driver.Caps) { c.Name = "Mem" }}},
}

func sabotaged(b driver.Backend, how sabotage) *bad {
	return &bad{Backend: b, how: how, sent: map[uint64]sent{}, locals: map[uint32]driver.Segment{},
		leases: map[driver.Shared][]driver.Memory{}}
}

// settled waits for what a sabotage does late.
func settled() {
	for w := newWait(10 * time.Second); pending.Load() > 0 && w.more(); {
	}
}

// overMem is mem under sabotage. Its memory is freed once nothing is done late any more: a late
// write is found by a check, and not by the kernel.
func overMem(how sabotage) Harness {
	lasting := func(n uint64) (*Space, error) {
		s, err := ForeignMemory(n)
		if err == nil {
			free := s.Free
			s.Free = func() error { settled(); return free() }
		}
		return s, err
	}
	h := Harness{Name: "mem", Guards: true, Remote: lasting, Local: lasting,
		New: func() (driver.Backend, error) {
			b, err := mem.New(mem.Config{BatchesMax: 64})
			return sabotaged(b, how), err
		}}
	if how.can&driver.CanDurable != 0 {
		h.Syncs = func(driver.Backend, func(), func()) {}
	}
	return h
}

// standing has a writer of the second process stand before Submit.
var standing atomic.Pointer[func()]

// overShm is shm under sabotage in this process, and in the second one as it is.
func overShm(how sabotage) Harness {
	return Harness{Name: "shm",
		New: func() (driver.Backend, error) {
			b, err := shm.New(shm.Config{})
			s := sabotaged(b, how)
			if _, second := os.LookupEnv(childVariable); err == nil && second {
				s.datagrams, err = landDatagrams()
			}
			return s, err
		},
		Park: func(_ string, f func()) {
			if f == nil {
				standing.Store(nil)
			} else {
				standing.Store(&f)
			}
		}, Spots: []string{"before Submit"},
	}
}

func TestMain(m *testing.M) {
	Main(m, overShm(sabotage{submit: func(p *badPeer, tag uint64, b *driver.Batch) error {
		if f := standing.Swap(nil); f != nil {
			(*f)()
		}
		return p.Peer.Submit(tag, b)
	}}))
}

// between are sabotages that another process is needed to notice.
var between = []struct {
	name, check string
	how         sabotage
}{
	{"a frozen writer is not kept out", "RevokeFrozen", noRevoke},
	{"a writer that is parked is not kept out", "RevokeParked", noRevoke},
	{"a dead writer holds up a revoke", "RevokeKilled", sabotage{
		revoke: func(_ driver.Memory, ctx context.Context) error {
			<-ctx.Done()
			return ctx.Err()
		}}},
	{"a dead peer is never lost", "PeerKilled", sabotage{
		lost: func(*badPeer) <-chan struct{} { return nil }}},
	{"an answer waits for room with a dead peer", "PeerKilled", sabotage{
		answer: func(b *bad, conn uint64, msg []byte) error {
			err := b.Backend.Answer(conn, msg)
			if errors.Is(err, driver.ErrPeerLost) {
				return driver.ErrFull
			}
			return err
		}}},
	{"a lease ends with others of its memory", "Random", sabotage{
		register: func(b *bad, seg driver.Segment) (driver.Memory, error) {
			m, err := b.Backend.Register(seg)
			if err != nil {
				return nil, err
			}
			b.mu.Lock()
			b.leases[seg.Shared] = append(b.leases[seg.Shared], m)
			b.mu.Unlock()
			return &badMemory{m, func(_ driver.Memory, ctx context.Context) (err error) {
				b.mu.Lock()
				others := slices.Clone(b.leases[seg.Shared])
				b.mu.Unlock()
				for _, m := range others {
					err = errors.Join(err, m.Revoke(ctx))
				}
				return err
			}}, nil
		}}},
	{"a frozen peer holds up Close", "PeerFrozen", sabotage{lose: func(p *badPeer) error {
		for w := newWait(3 * time.Second); w.more(); {
		}
		return p.Peer.Close()
	}}},
	{"bytes land that the kernel held for a frozen owner", "PeerFrozen", heldByTheKernel},
	{"bytes land for an owner that goes on", "PeerThawed", heldByTheKernel},
	{"a silent peer is lost", "PeerSilent", sabotage{lost: func(*badPeer) <-chan struct{} {
		c := make(chan struct{})
		close(c)
		return c
	}}},
}

// heldByTheKernel sends what large writes move as datagrams to the owner's process, which puts the
// bytes in place as it reads them (landDatagrams). They leave a moment after Submit, unless the
// peer was closed by then. Close ends all writes, and takes back nothing that was sent.
var heldByTheKernel = sabotage{
	submit: func(p *badPeer, tag uint64, b *driver.Batch) error {
		if len(b.Descs) == 0 || b.Descs[0].Len < 1<<20 {
			return p.Peer.Submit(tag, b)
		}
		d, op := b.Descs[0], b.Op
		p.b.later(func() {
			p.b.mu.Lock()
			bytes, over := p.b.locals[d.LocalKey].Mem[d.Local:][:1000], p.b.missing
			p.b.mu.Unlock()
			token, ok := p.tokens.Load(d.RemoteKey)
			if over || !ok || op == driver.Read {
				return
			}
			conn, err := net.DialUnix("unixgram", nil, datagramAddr(os.Getpid()))
			if err != nil {
				return
			}
			defer conn.Close()
			secret := token.([]byte)[:16:16]
			head := binary.LittleEndian.AppendUint64(secret, d.Remote)
			_, _ = conn.Write(append(head, bytes...))
		})
		return nil
	},
	lose: func(p *badPeer) error {
		err := p.Peer.Close()
		p.b.mu.Lock()
		defer p.b.mu.Unlock()
		p.b.missing = true
		for tag, s := range p.b.sent {
			if len(s.b.Descs) > 0 && s.b.Descs[0].Len >= 1<<20 {
				p.b.stash = append(p.b.stash, driver.Completion{Tag: tag, Err: driver.ErrClosed})
			}
		}
		return err
	},
}

func datagramAddr(parent int) *net.UnixAddr {
	return &net.UnixAddr{Net: "unixgram", Name: fmt.Sprintf("@drivertest-%d", parent)}
}

// landDatagrams is the owner's part of heldByTheKernel, in the second process.
func landDatagrams() (*net.UnixConn, error) {
	conn, err := net.ListenUnixgram("unixgram", datagramAddr(os.Getppid()))
	if err != nil {
		return nil, err
	}
	go func() {
		var mem [24 + 1000]byte
		for {
			n, err := conn.Read(mem[:])
			if err != nil {
				return
			}
			if seg, ok := secrets.Load([16]byte(mem[:16])); ok {
				at := binary.LittleEndian.Uint64(mem[16:])
				copy(seg.(driver.Segment).Mem[at:], mem[24:n])
			}
		}
	}()
	return conn, nil
}

var noRevoke = sabotage{revoke: func(driver.Memory, context.Context) error { return nil }}

// TestSabotage proves that every check named can fail, and that none is there which cannot.
func TestSabotage(t *testing.T) {
	if testkit.RaceEnabled {
		t.Log("not run with the race detector, which notices first")
		return
	}
	tried := map[string]bool{}
	for _, s := range sabotages {
		t.Run(s.name, func(t *testing.T) {
			for _, name := range strings.Fields(s.checks) {
				h := overMem(s.how)
				if name == "Renew" {
					h.Local, h.Remote = nil, nil // which have pages to renew
				}
				tried[name] = true
				notices(t, h, Pair, name)
			}
		})
	}
	for _, s := range between {
		t.Run(s.name, func(t *testing.T) {
			tried[s.check] = true
			notices(t, overShm(s.how), Processes, s.check)
		})
	}
	for _, c := range checks {
		if !tried[c.name] {
			t.Errorf("nothing here proves that %s can fail", c.name)
		}
	}
}

// notices fails the test if a check finds nothing.
func notices(t *testing.T, h Harness, w Wiring, name string) {
	t.Helper()
	for range 10 { // what is to be spoilt may have ended before
		if found := failures(t, h, w, name, 2*time.Second); len(found) > 0 {
			t.Logf("%s: %.150s", name, found[0])
			return
		}
	}
	t.Errorf("%s did not notice", name)
}

// TestWithoutSabotage: the wrapper alone is none.
func TestWithoutSabotage(t *testing.T) {
	h := overMem(sabotage{})
	h.Wirings, h.Without = Pair, []string{"NoAllocation"} // it keeps copies
	Run(t, h)
	h = overShm(sabotage{})
	h.Wirings = Processes
	for _, s := range between {
		h.Only = append(h.Only, s.check)
	}
	Run(t, h)
}
