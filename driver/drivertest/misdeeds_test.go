// SPDX-License-Identifier: Apache-2.0

package drivertest

import (
	"context"
	"errors"
	"io"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/sluicehq/sluice/driver"
)

// misdeeds are breaches of the contract, and the checks that must find them.
var misdeeds = []struct {
	name   string
	checks []string
	how    sabotage
}{
	{"copies a byte too few", []string{"Lengths", "DescsMax", "Load"}, sabotage{
		submit: func(p *saboteurPeer, tag uint64, b *driver.Batch) error {
			return p.Peer.Submit(tag, changed(b, func(d *driver.Desc) { d.Len = max(1, d.Len-1) }))
		},
	}},
	{"copies a byte too many", []string{"Lengths", "DescsMax"}, sabotage{
		submit: func(p *saboteurPeer, tag uint64, b *driver.Batch) error {
			if p.Peer.Submit(tag, changed(b, func(d *driver.Desc) { d.Len++ })) == nil {
				return nil
			}
			return p.Peer.Submit(tag, b)
		},
	}},
	{"rounds offsets down to 64", []string{"Lengths", "Pattern"}, sabotage{
		submit: func(p *saboteurPeer, tag uint64, b *driver.Batch) error {
			return p.Peer.Submit(tag, changed(b, func(d *driver.Desc) { d.Remote &^= 63 }))
		},
		pattern: func(p *saboteurPeer, tag uint64, b *driver.Batch) error {
			c, moved := copied(b), *b.Pattern
			moved.Remote.Base &^= 63
			c.Pattern = &moved
			return p.Peer.Submit(tag, &c)
		},
	}},
	{"lets peers reach all of a memory", []string{"Only"}, sabotage{
		register: func(b *saboteur, seg driver.Segment) (driver.Memory, error) {
			seg.Only = nil
			return b.Backend.Register(seg)
		},
	}},
	{"drops the last descriptor of many", []string{"DescsMax", "Neighbours", "SeveralMemories"},
		sabotage{
			submit: func(p *saboteurPeer, tag uint64, b *driver.Batch) error {
				c := copied(b)
				c.Descs = c.Descs[:max(1, len(c.Descs)-1)]
				return p.Peer.Submit(tag, &c)
			},
		}},
	{"completes before the bytes are there", []string{"Lengths"}, sabotage{
		submit: func(p *saboteurPeer, tag uint64, b *driver.Batch) error {
			p.remember(tag, b)
			if err := p.Peer.Submit(tag, changed(b, func(d *driver.Desc) {
				d.Len = 1
			})); err != nil {
				return err
			}
			f, _ := p.b.recall(tag)
			p.b.later(5*time.Millisecond, f.land)
			return nil
		},
	}},
	{"reads descriptors after Submit", []string{"DescsNotKept"}, sabotage{
		submit: func(p *saboteurPeer, tag uint64, b *driver.Batch) error {
			p.b.later(time.Millisecond, func() { _ = p.Peer.Submit(tag, b) })
			return nil
		},
	}},
	{"reads a pattern after Submit", []string{"PatternNotKept"}, sabotage{
		pattern: func(p *saboteurPeer, tag uint64, b *driver.Batch) error {
			p.b.later(time.Millisecond, func() { _ = p.Peer.Submit(tag, b) })
			return nil
		},
	}},
	{"ignores the local index list", []string{"Pattern"}, sabotage{
		pattern: func(p *saboteurPeer, tag uint64, b *driver.Batch) error {
			c, some := copied(b), *b.Pattern
			some.Local.List = nil
			c.Pattern = &some
			return p.Peer.Submit(tag, &c)
		},
	}},
	{"clamps what is out of bounds", []string{"Bounds"}, sabotage{
		submit: func(p *saboteurPeer, tag uint64, b *driver.Batch) error {
			err := p.Peer.Submit(tag, b)
			if errors.Is(err, driver.ErrBounds) {
				return p.Peer.Submit(tag, empty())
			}
			return err
		},
	}},
	{"starts a batch before it finds it bad", []string{"Bounds"}, sabotage{
		submit: func(p *saboteurPeer, tag uint64, b *driver.Batch) error {
			err := p.Peer.Submit(tag, b)
			if errors.Is(err, driver.ErrBounds) && len(b.Descs) > 1 {
				flight{p, driver.Batch{Op: b.Op, Descs: b.Descs[:1]}, 0}.land()
			}
			return err
		},
	}},
	{"takes any key for the last import", []string{"UnknownKeys"}, sabotage{
		submit: func(p *saboteurPeer, tag uint64, b *driver.Batch) error {
			return p.Peer.Submit(tag, changed(b, func(d *driver.Desc) { d.RemoteKey = 0 }))
		},
	}},
	{"finds an unknown key only at the end", []string{"UnknownKeys"}, sabotage{
		submit: func(p *saboteurPeer, tag uint64, b *driver.Batch) error {
			err := p.Peer.Submit(tag, b)
			if errors.Is(err, driver.ErrBounds) {
				p.b.put(driver.Completion{Tag: tag, Err: err})
				return nil
			}
			return err
		},
		poll: pollStash,
	}},
	{"does not say why a key is unknown", []string{"UnknownKeys"}, sabotage{
		submit: func(p *saboteurPeer, tag uint64, b *driver.Batch) error {
			err := p.Peer.Submit(tag, b)
			if errors.Is(err, driver.ErrBounds) {
				return driver.ErrBadToken
			}
			return err
		},
	}},
	{"imports a token under one key", []string{"ImportTwice"}, sabotage{
		imports: func(p *saboteurPeer, token []byte) (uint32, uint64, error) {
			p.mu.Lock()
			defer p.mu.Unlock()
			if key, ok := p.known[string(token)]; ok {
				return key, p.seen[key].Len, nil
			}
			p.mu.Unlock()
			key, size, err := p.admit(token)
			p.mu.Lock()
			p.known[string(token)] = key
			return key, size, err
		},
	}},
	{"drops every import of a token", []string{"ImportTwice"}, sabotage{
		drop: func(p *saboteurPeer, key uint32) {
			for k := range uint32(1000) {
				p.Peer.Drop(k)
			}
		},
	}},
	{"writes to read-only memory", []string{"ReadOnly"}, sabotage{
		register: func(b *saboteur, seg driver.Segment) (driver.Memory, error) {
			seg.ReadOnly = false
			return b.Backend.Register(seg)
		},
	}},
	{"registers what it cannot reach", []string{"Register"}, sabotage{
		register: func(b *saboteur, seg driver.Segment) (driver.Memory, error) {
			if seg.Kind != driver.DRAM {
				return nil, nil
			}
			return b.Backend.Register(seg)
		},
	}},
	{"does not look at the secret", []string{"ForgedToken", "ForeignToken"}, sabotage{
		imports: func(p *saboteurPeer, token []byte) (uint32, uint64, error) {
			var key uint32
			var size uint64
			err := driver.ErrBadToken
			secrets.Range(func(secret, _ any) bool {
				if len(token) > 16 {
					s := secret.([16]byte)
					key, size, err = p.Peer.Import(append(s[:], token[16:]...))
				}
				return err != nil
			})
			return key, size, err
		},
	}},
	{"ignores what follows a token", []string{"ForgedToken"}, sabotage{
		imports: func(p *saboteurPeer, token []byte) (uint32, uint64, error) {
			for n := len(token); n > 16; n-- {
				if key, size, err := p.admit(token[:n]); err == nil {
					return key, size, nil
				}
			}
			return p.admit(token)
		},
	}},
	{"panics at a short token", []string{"ForgedToken"}, sabotage{
		imports: func(p *saboteurPeer, token []byte) (uint32, uint64, error) {
			_ = token[16]
			return p.admit(token)
		},
	}},
	{"fails to begin a token with the secret", []string{"Token"}, sabotage{
		register: func(b *saboteur, seg driver.Segment) (driver.Memory, error) {
			seg.Secret[3] ^= 1
			return b.Backend.Register(seg)
		},
	}},
	{"completes twice", []string{"Lengths", "Load", "Hammer"}, sabotage{
		poll: func(b *saboteur, done []driver.Completion) (int, error) {
			n, err := b.Backend.Poll(done[1:])
			if n > 0 && b.every(7) {
				done[0] = done[1]
				return n + 1, nil
			}
			copy(done, done[1:1+n])
			return n, err
		},
	}},
	{"forgets a completion", []string{"Load", "Full"}, sabotage{
		poll: func(b *saboteur, done []driver.Completion) (int, error) {
			n, err := b.Backend.Poll(done)
			if n > 0 && b.every(3) {
				n--
			}
			return n, err
		},
	}},
	{"keeps 32 bits of a tag", []string{"Lengths"}, sabotage{
		poll: func(b *saboteur, done []driver.Completion) (int, error) {
			n, err := b.Backend.Poll(done)
			for i := range n {
				done[i].Tag &= 1<<32 - 1
			}
			return n, err
		},
	}},
	{"completes what it refused", []string{"Bounds", "UnknownKeys"}, sabotage{
		submit: func(p *saboteurPeer, tag uint64, b *driver.Batch) error {
			err := p.Peer.Submit(tag, b)
			if err != nil && !errors.Is(err, driver.ErrFull) {
				p.b.mu.Lock()
				p.b.stash = append(p.b.stash, driver.Completion{Tag: tag, Err: err})
				p.b.mu.Unlock()
			}
			return err
		},
		poll: pollStash,
	}},
	{"stays full", []string{"Full"}, sabotage{
		submit: func(p *saboteurPeer, tag uint64, b *driver.Batch) error {
			if p.b.every(100) || p.b.stuck() {
				return driver.ErrFull
			}
			return p.Peer.Submit(tag, b)
		},
	}},
	{"ends transfers whose key is dropped", []string{"DropInFlight"}, sabotage{
		submit: func(p *saboteurPeer, tag uint64, b *driver.Batch) error {
			p.remember(tag, &driver.Batch{})
			return p.Peer.Submit(tag, b)
		},
		drop: func(p *saboteurPeer, key uint32) {
			p.b.mu.Lock()
			for tag := range p.b.flights {
				p.Peer.Cancel(tag)
			}
			p.b.mu.Unlock()
			p.Peer.Drop(key)
		},
	}},
	{"writes after a cancel", []string{"CancelWrite", "CancelRead"}, sabotage{submit: kept,
		cancel: cancelKept, poll: landAborted}},
	{"writes after Peer.Close", []string{"PeerClose"}, sabotage{submit: remembered,
		closePeer: func(p *saboteurPeer) error {
			err := p.Peer.Close()
			for _, tag := range p.tags() {
				f, _ := p.b.recall(tag)
				p.b.later(8*time.Millisecond, f.land)
			}
			return err
		}}},
	{"closes a peer before its work is done", []string{"PeerClose"}, sabotage{
		closePeer: func(p *saboteurPeer) error {
			p.b.later(10*time.Millisecond, func() { _ = p.Peer.Close() })
			return nil
		},
	}},
	{"says nothing of a fault", []string{"FaultsNear", "FaultsFar"}, sabotage{
		poll: func(b *saboteur, done []driver.Completion) (int, error) {
			n, err := b.Backend.Poll(done)
			for i := range done[:n] {
				if errors.Is(done[i].Err, driver.ErrFault) {
					done[i].Err = nil
				}
			}
			return n, err
		},
	}},
	{"cancels every batch", []string{"CancelNothing"}, sabotage{
		submit: remembered,
		cancel: func(p *saboteurPeer, _ uint64) {
			p.b.mu.Lock()
			defer p.b.mu.Unlock()
			for tag, f := range p.b.flights {
				f.p.Peer.Cancel(tag)
			}
		},
	}},
	{"does not revoke", []string{"FenceRevokes", "FenceNeighbour", "SilenceUnderWrites"}, sabotage{
		revoke: func(*saboteurMemory, context.Context) error { return nil },
	}},
	{"lands a write after the revoke", []string{"SilenceUnderWrites"}, sabotage{submit: remembered,
		poll: landFailed}},
	{"revokes slowly", []string{"FenceIdle"}, sabotage{
		revoke: func(m *saboteurMemory, ctx context.Context) error {
			time.Sleep(5 * time.Millisecond)
			return m.Memory.Revoke(ctx)
		},
	}},
	{"revokes once alone", []string{"RevokeTwice"}, sabotage{
		revoke: func(m *saboteurMemory, ctx context.Context) error {
			if m.done.Swap(true) {
				return driver.ErrClosed
			}
			return m.Memory.Revoke(ctx)
		},
	}},
	{"sends the message before the data", []string{"NotifyAfterData"},
		sabotage{notify: messageFirst, poll: hidden}},
	{"swaps messages", []string{"NotifyOrder", "NotifyBackPressure"}, sabotage{
		receive: func(b *saboteur, msgs []driver.Message) (int, error) {
			n, err := b.Backend.Receive(msgs)
			if n > 1 {
				msgs[0], msgs[1] = msgs[1], msgs[0]
			}
			return n, err
		},
	}},
	{"loses messages", []string{"NotifyBackPressure"}, sabotage{
		receive: func(b *saboteur, msgs []driver.Message) (int, error) {
			n, err := b.Backend.Receive(msgs)
			if n > 0 && b.every(5) {
				n--
			}
			return n, err
		},
	}},
	{"forgets who sent a message", []string{"NotifyOrder"}, sabotage{
		receive: func(b *saboteur, msgs []driver.Message) (int, error) {
			n, err := b.Backend.Receive(msgs)
			for i := range n {
				msgs[i].Conn = 0
			}
			return n, err
		},
	}},
	{"takes an empty message for none", []string{"PatternNotify"}, sabotage{
		receive: func(b *saboteur, msgs []driver.Message) (int, error) {
			n, err := b.Backend.Receive(msgs)
			if n == 1 && len(msgs[0].Data) == 0 && msgs[0].Err == nil {
				return 0, err
			}
			return n, err
		},
	}},
	{"cuts long messages", []string{"NotifySizes"}, sabotage{
		notify: func(p *saboteurPeer, tag uint64, b *driver.Batch) error {
			c := copied(b)
			c.Notify = c.Notify[:min(len(c.Notify), p.b.Caps().MessageMax)]
			return p.Peer.Submit(tag, &c)
		},
	}},
	{"says nothing of a peer that closed", []string{"LastMessagePolite", "LastMessageInFlight",
		"LastMessageOfBackend"}, sabotage{
		receive: func(b *saboteur, msgs []driver.Message) (int, error) {
			n, err := b.Backend.Receive(msgs)
			if n > 0 && msgs[n-1].Err != nil {
				n--
			}
			return n, err
		},
	}},
	{"says twice that a peer closed", []string{"LastMessagePolite", "LastMessageInFlight",
		"LastMessageOfBackend"}, sabotage{
		receive: func(b *saboteur, msgs []driver.Message) (int, error) {
			n, err := b.Backend.Receive(msgs)
			if n > 0 && msgs[n-1].Err != nil {
				last := msgs[n-1]
				b.later(5*time.Millisecond, func() { b.repeat(last) })
			}
			if last, ok := b.repeated(); ok && n < len(msgs) {
				msgs[n] = last
				n++
			}
			return n, err
		},
	}},
	{"says that a peer closed when it has forgotten others", []string{"LastMessageOfBackend"},
		sabotage{
			receive: func(b *saboteur, msgs []driver.Message) (int, error) {
				n, err := b.Backend.Receive(msgs)
				if n > 0 && msgs[n-1].Err != nil && b.every(2) {
					n--
				}
				return n, err
			},
		}},
	{"moves nothing until it is polled", []string{"NoPoll", "NoPollNotify", "PeerClose"}, sabotage{
		submit: func(p *saboteurPeer, tag uint64, b *driver.Batch) error {
			c := copied(b)
			p.b.atPoll(func() error { return p.Peer.Submit(tag, &c) })
			return nil
		},
		notify: func(p *saboteurPeer, tag uint64, b *driver.Batch) error {
			c := copied(b)
			p.b.atPoll(func() error { return p.Peer.Submit(tag, &c) })
			return nil
		},
		poll: pollLazily,
	}},
	{"waits in a revoke until the writer polls", []string{"NoPollFence"}, sabotage{
		submit: func(p *saboteurPeer, tag uint64, b *driver.Batch) error {
			unpolled.Store(true)
			return p.Peer.Submit(tag, b)
		},
		poll: func(b *saboteur, done []driver.Completion) (int, error) {
			n, err := b.Backend.Poll(done)
			if n > 0 {
				unpolled.Store(false)
			}
			return n, err
		},
		revoke: func(m *saboteurMemory, ctx context.Context) error {
			for unpolled.Load() && ctx.Err() == nil {
				time.Sleep(time.Millisecond)
			}
			return m.Memory.Revoke(ctx)
		},
	}},
	{"forgets that it is closed", []string{"CloseTwice", "PeerClose", "BackendClose"}, sabotage{
		pattern: func(p *saboteurPeer, tag uint64, b *driver.Batch) error {
			err := p.Peer.Submit(tag, b)
			if errors.Is(err, driver.ErrClosed) {
				return driver.ErrBounds
			}
			return err
		},
	}},
	{"reads a message after Submit", []string{"NotifyNotKept"}, sabotage{
		notify: func(p *saboteurPeer, tag uint64, b *driver.Batch) error {
			p.b.later(time.Millisecond, func() { _ = p.Peer.Submit(tag, b) })
			return nil
		},
	}},
	{"reuses the bytes of messages", []string{"NotifyNotKept"}, sabotage{receive: reuseBytes}},
	{"takes messages without limit", []string{"NotifyBackPressure"}, sabotage{
		notify: func(p *saboteurPeer, tag uint64, b *driver.Batch) error {
			p.b.mu.Lock()
			p.b.stash = append(p.b.stash, driver.Completion{Tag: tag})
			p.b.mu.Unlock()
			return nil
		},
		poll: pollStash,
	}},
	{"sends the message of a batch that failed", []string{"NotifyOfFailedBatch", "CancelNotify"},
		sabotage{
			notify: remembered, poll: notifyFailed,
		}},
	{"loses wake-ups", []string{"ArmCompletion", "ArmMessage"}, sabotage{
		arm: func(b *saboteur) (bool, error) {
			if b.every(5) {
				return false, nil
			}
			return b.Backend.Arm()
		},
	}},
	{"does not see a message when it arms", []string{"ArmReady"}, sabotage{
		arm: func(b *saboteur) (bool, error) {
			_, err := b.Backend.Arm()
			return false, err
		},
	}},
	{"wakes nobody for a peer that came later", []string{"ArmBeforeConnect"}, sabotage{
		arm: func(b *saboteur) (bool, error) {
			if b.stuck() { // it has heard of somebody
				return b.Backend.Arm()
			}
			return false, nil
		},
		receive: func(b *saboteur, msgs []driver.Message) (int, error) {
			n, err := b.Backend.Receive(msgs)
			if n > 0 {
				b.mu.Lock()
				b.count = 1000
				b.mu.Unlock()
			}
			return n, err
		},
	}},
	{"allocates in Submit", []string{"NoAllocation"}, sabotage{
		submit: func(p *saboteurPeer, tag uint64, b *driver.Batch) error {
			return p.Peer.Submit(tag, changed(b, func(*driver.Desc) {}))
		},
	}},
	{"accepts every address", []string{"ConnectNonsense", "ConnectGone"}, sabotage{
		connect: func(b *saboteur, ctx context.Context, addr []byte) (driver.Peer, error) {
			p, err := b.dial(ctx, addr)
			if err != nil && ctx.Err() == nil {
				return b.dial(ctx, b.Addr())
			}
			return p, err
		},
	}},
	{"ignores the context of Connect", []string{"ConnectNonsense"}, sabotage{
		connect: func(b *saboteur, ctx context.Context, addr []byte) (driver.Peer, error) {
			p, err := b.dial(ctx, addr)
			if err != nil {
				dawdle()
			}
			return p, err
		},
	}},
	{"forgets descriptors", []string{"ConnectTwice"}, sabotage{
		connect: func(b *saboteur, ctx context.Context, addr []byte) (driver.Peer, error) {
			forgotten, err := os.Open(os.DevNull)
			if err != nil {
				return nil, err
			}
			litter.drop(forgotten)
			return b.dial(ctx, addr)
		},
	}},
	{"gives a key back twice", []string{"CloseTwice"}, sabotage{
		register: func(b *saboteur, seg driver.Segment) (driver.Memory, error) {
			m, err := b.Backend.Register(seg)
			return &twice{Memory: m, b: b}, err
		},
	}},
	{"never ends Close", []string{"CloseTwice"}, sabotage{
		closing: func(b *saboteur) error {
			err := b.Backend.Close()
			dawdle()
			return err
		},
	}},
	{"works after Close", []string{"CloseTwice"}, sabotage{
		register: func(b *saboteur, seg driver.Segment) (driver.Memory, error) {
			m, err := b.Backend.Register(seg)
			if errors.Is(err, driver.ErrClosed) {
				return nil, nil
			}
			return m, err
		},
	}},
}

// twice is a memory whose key goes to the next two, once it was revoked twice.
type twice struct {
	driver.Memory
	b       *saboteur
	revoked bool
}

var freeTwice sync.Map // *saboteur: key

func (m *twice) Revoke(ctx context.Context) error {
	if m.revoked {
		freeTwice.Store(m.b, m.Memory.Key())
	}
	m.revoked = true
	return m.Memory.Revoke(ctx)
}

func (m *twice) Key() uint32 {
	if key, ok := freeTwice.Load(m.b); ok && !m.revoked {
		return key.(uint32)
	}
	return m.Memory.Key()
}

// TestMisdeeds proves that every check named can fail. Some misdeeds are data
// races themselves.
func TestMisdeeds(t *testing.T) {
	if raceEnabled {
		t.Log("not run with the race detector, which notices first")
		return
	}
	for _, m := range misdeeds {
		t.Run(m.name, func(t *testing.T) {
			for _, name := range m.checks {
				c := find(t, name)
				w := Pair
				if c.wirings&Pair == 0 {
					w = Self
				}
				notices(t, c, sabotaged(m.how), w)
			}
		})
	}
}

// notices fails the test if a check finds nothing. A panic is a finding where the misdeed is to
// panic; else the misdeed has broken off, and the check was not put to the test.
func notices(t *testing.T, c check, h Harness, w Wiring) {
	t.Helper()
	h.Settle = misdeedsDone
	// What a misdeed wants to spoil may have ended before it comes. One finding is the proof.
	var failures []string
	for try := 0; len(failures) == 0 && try < 10; try++ {
		failures = Failures(t, h, w, c.name)
		litter.clear()
	}
	for _, failure := range failures {
		if strings.HasPrefix(failure, panicked) && !strings.Contains(t.Name(), "/panics_") {
			t.Errorf("%s: the misdeed itself broke off: %s", c.name, failure)
		}
	}
	if len(failures) == 0 {
		t.Fatalf("%s did not notice", c.name)
	}
	t.Logf("%s: %.200s", c.name, failures[0])
}

// misdeedsDone waits until those that were put off are done.
func misdeedsDone() {
	for wait := newPatience(errandsMax); pending.Load() > 0 && wait.more(); {
	}
}

// dawdle comes back once a check has waited in vain. A sleep longer than the check's limit would
// not do: where the process stands still for both, the call seems to be in time.
func dawdle() {
	was := overdue.Load()
	for wait := newPatience(errandsMax); overdue.Load() == was && wait.more(); {
	}
}

// litter is what misdeeds leave behind, until their check has ended.
var litter heap

type heap struct {
	mu    sync.Mutex
	items []io.Closer
}

func (h *heap) drop(c io.Closer) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.items = append(h.items, c)
}

func (h *heap) clear() {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, c := range h.items {
		_ = c.Close()
	}
	h.items = nil
}

// TestGoodDeeds proves that the wrapper alone is no misdeed.
func TestGoodDeeds(t *testing.T) {
	h := sabotaged(sabotage{}).withDefaults()
	h.Limit = 10 * time.Second
	for _, name := range []string{
		"Lengths", "Load", "Full", "ForgedToken", "CancelWrite", "SilenceUnderWrites",
		"NotifyAfterData", "NotifyOrder", "ArmCompletion", "NoAllocation", "CloseTwice",
	} {
		t.Run(name, func(t *testing.T) { find(t, name).perform(t, h, Pair) })
	}
}

func find(t *testing.T, name string) check {
	t.Helper()
	for _, c := range checks {
		if c.name == name {
			return c
		}
	}
	t.Fatalf("no check is called %q", name)
	return check{}
}
