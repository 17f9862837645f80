// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"cmp"
	"context"
	"sync"
	"sync/atomic"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/proc"
	"github.com/sluicehq/sluice/internal/wire"
)

// fake is a backend that completes when the test says so, for what no honest
// backend does. It swallows the hellos of the engine. As the contract allows, a completion
// that came to be in Submit wakes no goroutine.
type fake struct {
	driver.BackendBase
	name        string // default "fake"
	room        int    // outstanding batches before ErrFull; 0: any number
	brokenClose bool   // Peer.Close completes nothing, against the contract
	manual      bool   // batches stay until finishOne
	sleep       bool   // who waits should sleep at once
	double      bool   // everything completes twice, against the contract
	mute        bool   // it carries no messages
	hellos      bool   // hellos are batches like others

	open sync.Once
	wake *proc.Event

	// Called first, without a lock; nil: not. Peers are numbered as they connect.
	onConnect func(peer int) error
	onSubmit  func(peer int, op driver.Op, tag uint64, notify bool) error
	onCancel  func(tag uint64)
	onHelp    func(tag uint64) bool
	onImport  func() error
	onReceive func(msgs []driver.Message) int
	onRevoke  func(ctx context.Context) error
	onClose   func() error // of a Peer

	peers   atomic.Int32
	mu      sync.Mutex
	tags    []uint64 // outstanding, in order of submission
	batches []int    // descriptors of each batch so far; -1: with a message
	ready   []driver.Completion
}

func (f *fake) Caps() driver.Caps {
	return driver.Caps{Name: cmp.Or(f.name, "fake"),
		Pairs: driver.Pairs{driver.DRAM: driver.KindsOf(driver.DRAM)}, DescsMax: 1,
		MessageMax: f.messageMax(), Sleep: f.sleep, Cost: driver.Cost{Rate: 1e9}}
}

func (f *fake) messageMax() int {
	if f.mute {
		return 0
	}
	return messageMin
}

// FD never becomes readable by itself: the fake stirs it where the contract says so.
func (f *fake) FD() int {
	f.open.Do(func() { f.wake, _ = proc.NewEvent() })
	return f.wake.FD()
}

func (f *fake) Arm() (bool, error) { return false, nil }

// wakeEngine wakes the engine.
func (f *fake) wakeEngine() {
	f.FD()
	_ = f.wake.Signal()
}

func (f *fake) Register(driver.Segment) (driver.Memory, error) { return fakeMemory{f}, nil }
func (f *fake) Addr() []byte                                   { return []byte("fake") }

func (f *fake) Close() error {
	f.FD()
	return f.wake.Close()
}

func (f *fake) Connect(context.Context, []byte) (driver.Peer, error) {
	p := &fakePeer{f: f, number: int(f.peers.Add(1)) - 1, lost: make(chan struct{})}
	if f.onConnect != nil {
		return p, f.onConnect(p.number)
	}
	return p, nil
}

func (f *fake) Receive(msgs []driver.Message) (int, error) {
	if f.onReceive != nil {
		return f.onReceive(msgs), nil
	}
	return 0, nil
}

func (f *fake) Poll(done []driver.Completion) (int, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	n := copy(done, f.ready)
	f.ready = f.ready[n:]
	return n, nil
}

func (f *fake) submit(tag uint64, size int) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.room > 0 && len(f.tags) >= f.room {
		return driver.ErrFull
	}
	f.batches = append(f.batches, size)
	f.tags = append(f.tags, tag)
	if !f.manual {
		f.finish(nil)
	}
	return nil
}

// finish completes the oldest batch.
func (f *fake) finish(err error) {
	f.ready = append(f.ready, driver.Completion{Tag: f.tags[0], Err: err})
	if f.double {
		f.ready = append(f.ready, f.ready[len(f.ready)-1])
	}
	f.tags = f.tags[1:]
	if f.manual {
		f.wakeEngine()
	}
}

// finishOne completes the oldest batch, if there is one.
func (f *fake) finishOne(err error) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	if len(f.tags) == 0 {
		return false
	}
	f.finish(err)
	return true
}

func (f *fake) seen() []int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return append([]int(nil), f.batches...)
}

type fakeMemory struct{ f *fake }

func (fakeMemory) Key() uint32                          { return 1 }
func (fakeMemory) AppendToken(b []byte) ([]byte, error) { return append(b, "token"...), nil }

func (m fakeMemory) Revoke(ctx context.Context) error {
	if m.f.onRevoke != nil {
		return m.f.onRevoke(ctx)
	}
	return nil
}

type fakePeer struct {
	driver.PeerBase
	f        *fake
	number   int
	lost     chan struct{}
	loseOnce sync.Once
}

func (p *fakePeer) Import([]byte) (uint32, uint64, error) {
	if p.f.onImport != nil {
		if err := p.f.onImport(); err != nil {
			return 0, 0, err
		}
	}
	return 1, 1 << 16, nil
}

func (p *fakePeer) Drop(uint32)           {}
func (p *fakePeer) Lost() <-chan struct{} { return p.lost }
func (p *fakePeer) lose()                 { p.loseOnce.Do(func() { close(p.lost) }) }

func (p *fakePeer) Can() driver.Can {
	if p.f.mute {
		return 0
	}
	return driver.CanNotify
}

func (p *fakePeer) Conn() uint64               { return uint64(p.number) + 1 }
func (p *fakePeer) Explain(_, _ uint32) string { return "fake" }

func (p *fakePeer) Submit(tag uint64, b *driver.Batch) error {
	if err := b.Check(p.Can()); err != nil {
		return err
	}
	notify := b.Tail == driver.NotifyTail
	if notify && !p.f.hellos && len(b.Notify) > 0 && b.Notify[0] == wire.KindHello {
		p.f.mu.Lock()
		defer p.f.mu.Unlock()
		p.f.ready = append(p.f.ready, driver.Completion{Tag: tag})
		return nil
	}
	size := len(b.Descs)
	if notify {
		size = -1
	}
	if p.f.onSubmit != nil {
		if err := p.f.onSubmit(p.number, b.Op, tag, notify); err != nil {
			return err
		}
	}
	return p.f.submit(tag, size)
}

// Cancel ends a batch that is outstanding; a tag that is not is ignored.
func (p *fakePeer) Cancel(tag uint64) {
	if p.f.onCancel != nil {
		p.f.onCancel(tag)
	}
}

func (p *fakePeer) Help(tag uint64, _ <-chan struct{}) bool {
	return p.f.onHelp != nil && p.f.onHelp(tag)
}

// drop completes one outstanding tag. It reports whether there was one.
func (f *fake) drop(tag uint64, err error) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	for i, other := range f.tags {
		if other == tag {
			f.tags = append(f.tags[:i:i], f.tags[i+1:]...)
			f.ready = append(f.ready, driver.Completion{Tag: tag, Err: err})
			f.wakeEngine()
			return true
		}
	}
	return false
}

func (p *fakePeer) Close() error {
	if p.f.onClose != nil {
		if err := p.f.onClose(); err != nil {
			return err
		}
	}
	p.f.mu.Lock()
	defer p.f.mu.Unlock()
	for !p.f.brokenClose && len(p.f.tags) > 0 {
		p.f.finish(driver.ErrClosed)
	}
	p.lose()
	return nil
}
