// SPDX-License-Identifier: Apache-2.0

package handoff

import (
	"context"
	"crypto/rand"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/backends/mem"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/internal/testing/testkit"
	"github.com/sluicehq/sluice/kv/layout"
)

// reluctant is a backend that begins transfers of bytes only once it is let, and ends none before,
// as a device that does not answer.
type reluctant struct {
	*mem.Backend

	mu    sync.Mutex
	holds bool
	held  []func()
}

type reluctantPeer struct {
	driver.Peer
	b *reluctant
}

func (b *reluctant) Connect(ctx context.Context, addr []byte) (driver.Peer, error) {
	p, err := b.Backend.Connect(ctx, addr)
	if err != nil {
		return nil, err
	}
	return &reluctantPeer{p, b}, nil
}

// wait has f called later, if anything is held back; always: in any case.
func (b *reluctant) wait(always bool, f func()) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if !b.holds || !always && len(b.held) == 0 {
		return false
	}
	b.held = append(b.held, f)
	return true
}

// hold holds back what comes; let goes on with it.
func (b *reluctant) hold() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.holds = true
}

func (b *reluctant) let() {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, f := range b.held {
		f()
	}
	b.holds, b.held = false, nil
}

func (b *reluctant) count() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return len(b.held)
}

func (p *reluctantPeer) Submit(tag uint64, batch *driver.Batch) error {
	later := *batch
	if batch.Pattern != nil || len(batch.Descs) > 0 {
		if batch.Pattern != nil {
			pattern := *batch.Pattern
			later.Pattern = &pattern
		}
		if p.b.wait(true, func() { _ = p.Peer.Submit(tag, &later) }) {
			return nil
		}
	}
	return p.Peer.Submit(tag, batch)
}

func (p *reluctantPeer) Cancel(tag uint64) {
	if !p.b.wait(false, func() {}) {
		p.Peer.Cancel(tag)
	}
}

func (p *reluctantPeer) Close() error {
	if p.b.wait(false, func() { _ = p.Peer.Close() }) {
		return nil
	}
	return p.Peer.Close()
}

// withReluctant opens a crowd over such backends, and returns them, by rank, senders first.
func withReluctant(t *testing.T, pull bool) (*crowd, []*reluctant) {
	var list []*reluctant
	s := fourToTwo(t, func(t testing.TB) driver.Backend {
		b := &reluctant{Backend: newMem(t).(*mem.Backend)}
		list = append(list, b)
		return b
	}, pull)
	s.engine = func(c *engine.Config) { c.AbortGrace = 50 * time.Millisecond }
	return newCrowd(t, s), list
}

// TestGroupTransfersThatDoNotEnd: a receiver whose backend cannot end a read has no proof, and must
// not say that nothing lands in its blocks any more. Nor must a sender say that of a write: its
// blocks are still read.
func TestGroupTransfersThatDoNotEnd(t *testing.T) {
	for name, pull := range map[string]bool{"a write": false, "a read": true} {
		testkit.RunInVirtualTime(t, name, func(t *testing.T) {
			c, backends := withReluctant(t, pull)
			j := c.newJob(t, layout.Span{To: 40})
			j.begin(t)
			slow := backends[0]
			if pull {
				slow = backends[len(c.from)]
			}
			slow.hold()
			require.NoError(t, j.pushes[0].Layer(within(t), 0))
			await(t, name, func() bool { return slow.count() > 0 })
			var err error
			if pull {
				err = j.requests[0].Cancel(within(t))
				<-j.requests[0].Done()
				require.ErrorIs(t, j.requests[0].Err(), engine.ErrUnproven)
			} else {
				err = j.pushes[0].Abort(within(t))
				require.ErrorIs(t, err, engine.ErrUnproven)
				require.ErrorIs(t, j.pushes[0].Err(), ErrInUse)
			}
			slow.let()
			c.leaves()
			require.ErrorIs(t, err, ErrInUse)
		})
	}
}

// leaves has the crowd close without a look at errors: what did not end stays listed.
func (c *crowd) leaves() {
	for _, m := range c.from {
		m.closed = true
	}
	for _, m := range c.to {
		m.closed = true
	}
}

// revokedPlaces are those of a request whose rank has revoked its lease since.
func revokedPlaces(t *testing.T, m *member, tables layout.Tables) places {
	t.Helper()
	l, err := m.regions[0].Lease(0, m.regions[0].Size(), engine.LeaseOptions{})
	require.NoError(t, err)
	p := places{tables, []token{{layerRange{0, 0, 3}, l.Token()}}}
	require.NoError(t, l.Revoke(within(t)))
	return p
}

// TestGroupLeaseRevokedBeforeItsImport: another rank ends a request while this one imports the
// lease of a third. That is an end like any other, and not a failure of this rank.
func TestGroupLeaseRevokedBeforeItsImport(t *testing.T) {
	over(t, func(t *testing.T, open func(testing.TB) driver.Backend) {
		for _, pull := range []bool{false, true} {
			s := fourToTwo(t, open, pull)
			edge := s.config
			s.config = func(sends bool, g *GroupConfig) {
				edge(sends, g)
				g.NotifyTimeout = 50 * time.Millisecond // the third rank says nothing here
			}
			c := newCrowd(t, s)
			j := &job{c: c, number: 1, span: layout.Span{To: 40}}
			from, to := c.from[0].tables(t, 40), c.to[0].tables(t, 40)
			var err error
			if pull {
				err = j.importByReceiver(t, from, to)
				require.ErrorIs(t, err, engine.ErrAborted)
			} else {
				err = j.importBySender(t, from, to)
				require.ErrorIs(t, err, ErrCancelled)
			}
			var end *EndError
			require.ErrorAs(t, err, &end)
			require.True(t, end.Remote)
		}
	})
}

func (j *job) importBySender(t *testing.T, from, to layout.Tables) error {
	t.Helper()
	m := j.c.from[0]
	granted := revokedPlaces(t, j.c.to[0], to)
	ended := make(chan error, 1)
	go func() {
		_, err := m.sender.Begin(within(t), j.number, from, j.span)
		ended <- err
	}()
	await(t, "the request begins", func() bool { return len(m.sender.all()) == 1 })
	b := granted.append(nil)
	push := m.sender.all()[0]
	push.receive(push.links[0], &message{kind: kindGrant, total: uint32(len(b)), bytes: b})
	return <-ended
}

func (j *job) importByReceiver(t *testing.T, from, to layout.Tables) error {
	t.Helper()
	r := j.c.to[0].receive
	ask := groupBegin{request: j.number, plan: r.plan, op: engine.Read, span: j.span,
		places: revokedPlaces(t, j.c.from[0], from)}
	rand.Read(ask.seed[:])
	b := ask.append(nil)
	msg := appendHeader(nil, toReceiver, kindBegin, 0, 77)
	msg = append(msg, byte(len(b)), byte(len(b)>>8), 0, 0, 0, 0, 0, 0)
	r.receive(engine.Notification{Peer: r.cfg.Peers[0], Data: append(msg, b...)})
	q, err := r.Open(within(t), j.number, to, j.span)
	if err != nil {
		return err
	}
	<-q.Done()
	return q.Err()
}

// TestGroupLateBeginOutlivesAnEnd: a rank begins a request whose end at a receiver takes long, and
// is forgotten meanwhile: Close ends what it has begun, too.
func TestGroupLateBeginOutlivesAnEnd(t *testing.T) {
	s := fourToTwo(t, newMem, false)
	s.config = func(_ bool, g *GroupConfig) { g.RequestsMax, g.MeetTimeout = 1, time.Hour }
	c := newCrowd(t, s)
	r := c.to[0].receive
	j := c.newJob(t, layout.Span{To: 40})
	first, err := r.claim(j.number) // as Open does, which then takes long
	require.NoError(t, err)
	prepared := sync.OnceFunc(func() { close(first.prepared) })
	t.Cleanup(prepared)                   // before the Close that waits for it
	ended := func(n uint64) func() bool { // on both: one that remembers a number refuses it
		return func() bool {
			return r.Stats().Ended[Aborted] == n && c.to[1].receive.Stats().Ended[Aborted] == n
		}
	}
	begin := func(ctx context.Context, rank int, number uint64) chan error {
		begun := make(chan error, 1)
		go func() {
			_, err := c.from[rank].sender.Begin(ctx, number, j.from[rank], j.span)
			begun <- err
		}()
		await(t, "a begin", func() bool {
			r.mu.Lock()
			defer r.mu.Unlock()
			q := r.requests[number]
			return q != nil && q.links[rank] != nil
		})
		return begun
	}
	for i, number := range []uint64{j.number, j.number + 1} {
		ctx, cancel := context.WithCancel(within(t))
		begun := begin(ctx, 0, number)
		cancel()
		require.ErrorIs(t, <-begun, engine.ErrAborted)
		await(t, "the news", ended(uint64(i)+1))
	}
	late := begin(within(t), 1, j.number)
	prepared() // and the first one ends
	<-first.closed
	closed := make(chan error, 1)
	go func() { closed <- r.Close() }()
	select {
	case err := <-late:
		require.ErrorIs(t, err, engine.ErrClosed)
	case <-within(t).Done():
		require.Fail(t, "Close leaves a request that was begun, and waits for it")
	}
	require.NoError(t, <-closed)
}

// TestGroupZerosThatDoNotEnd: zeros that are on their way into the blocks when Open ends may land
// later, and Open says so, also where another rank has ended the request meanwhile.
func TestGroupZerosThatDoNotEnd(t *testing.T) {
	for name, aborted := range map[string]bool{"alone": false, "aborted meanwhile": true} {
		t.Run(name, func(t *testing.T) {
			c, backends := withReluctant(t, false)
			r := c.to[0].receive
			r.memory[0] = nil // as if it were of a device
			require.NoError(t, r.prepareZeros())
			j := c.newJob(t, layout.Span{To: 40})
			slow := backends[len(c.from)]
			slow.hold()
			ctx, cancel := context.WithCancel(within(t))
			opened := make(chan error, 1)
			go func() {
				_, err := r.Open(ctx, j.number, j.to[0], j.span)
				opened <- err
			}()
			await(t, "the zeros", func() bool { return slow.count() > 0 })
			if aborted {
				c.abortedBegin(t, j)
			}
			cancel()
			err := <-opened
			slow.let()
			c.leaves()
			require.ErrorIs(t, err, engine.ErrUnproven)
		})
	}
}

// abortedBegin has sending rank 0 begin a request, and give up.
func (c *crowd) abortedBegin(t *testing.T, j *job) {
	t.Helper()
	ctx, cancel := context.WithCancel(within(t))
	begun := make(chan error, 1)
	go func() {
		_, err := c.from[0].sender.Begin(ctx, j.number, j.from[0], j.span)
		begun <- err
	}()
	r := c.to[0].receive
	await(t, "a begin", func() bool {
		r.mu.Lock()
		defer r.mu.Unlock()
		q := r.requests[j.number]
		return q != nil && q.links[0] != nil
	})
	cancel()
	require.ErrorIs(t, <-begun, engine.ErrAborted)
	await(t, "the news", func() bool { return r.Stats().Ended[Aborted] == 1 })
}

// TestGroupQuestionsOfOneRankAreItsOwn: a rank that asks again before it has its answer takes no
// place from another one, which would be blamed for that.
func TestGroupQuestionsOfOneRankAreItsOwn(t *testing.T) {
	s := fourToTwo(t, newMem, false)
	s.from = sidesOf(t, grouped(3, 4, 16), layout.Placement{BlockTokens: 4})
	config := s.config
	s.config = func(sends bool, g *GroupConfig) {
		config(sends, g)
		g.Digest = all
	}
	c := newCrowd(t, s)
	j := c.newJob(t, layout.Span{To: 40})
	p, err := newGroupPush(c.from[0].sender, j.number, j.from[0], j.span) // no question is answered
	require.NoError(t, err)
	for _, l := range p.links {
		close(l.sent)
	}
	p.claimed[0] = true
	ask := &message{kind: kindAsk, bytes: (&question{number: 1}).append(nil)}
	p.receive(p.links[0], ask)
	require.NoError(t, p.Err())
	p.receive(p.links[0], ask) // more than one of a rank
	p.receive(p.links[1], ask)
	var end *EndError
	require.ErrorAs(t, p.Err(), &end)
	require.Equal(t, "decode-0", end.Peer, "who has broken the protocol")
}
