// SPDX-License-Identifier: Apache-2.0

package replay

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/internal/proc"
	"github.com/sluicehq/sluice/kv/handoff"
	"github.com/sluicehq/sluice/kv/layout"
)

// The messages between the parent and the ranks. Each rank answers each of the parent's, and the
// parent goes on when all have: fill, run and check are of one round of requests.
const (
	kindMeet      = "meet"      // answers kindPlan: groupMeeting
	kindPeers     = "peers"     // groupPeers; the answer is kindConnected
	kindConnected = "connected" // the answer to it is kindOpen
	kindOpen      = "open"      // hear the others; the answer is kindReady
	kindFill      = "fill"      // make the content, take blocks; the answer is kindFilled
	kindFilled    = "filled"
	kindRun       = "run"    // hand over; the answer is kindEnded
	kindPoised    = "poised" // before kindEnded: a rank may be killed now
	kindEnded     = "ended"  // []groupOutcome
	kindCheck     = "check"  // compare; the answer is kindChecked: bytes that have come
	kindClose     = "close"  // hear no more; the answer is kindClosed
	kindClosed    = "closed" // the answer to it is kindFinish; its answer is kindResult
)

// groupTold is what one rank is told.
type groupTold struct {
	Plan  groupPlan `json:"plan"`
	Side  Side      `json:"side"`
	Index int       `json:"index"`
}

// groupMeeting is how other ranks reach one.
type groupMeeting struct {
	Description []byte `json:"description"`
	Side        []byte `json:"side"`
}

// groupPeers is all ranks.
type groupPeers struct {
	Prefill []groupMeeting `json:"prefill"`
	Decode  []groupMeeting `json:"decode"`
}

// groupOutcome is what became of one request on one rank.
type groupOutcome struct {
	Error    string `json:"error"` // empty: it is complete
	Planned  bool   `json:"planned"`
	Damaged  bool   `json:"damaged"`  // digests differ
	Unproven bool   `json:"unproven"` // bytes may land still
}

// groupRankResult is what a rank says at its end.
type groupRankResult struct {
	Checked uint64   `json:"checked"`
	Wrong   uint64   `json:"wrong"`
	First   []string `json:"first"`
	Reused  uint64   `json:"reused"`
	Faults  uint64   `json:"faults"` // that rules have made
	Leaked  uint64   `json:"leaked"` // blocks, leases and requests
	Route   string   `json:"route"`
}

// groupRank is the process of one rank.
type groupRank struct {
	c    *proc.Control
	ctx  context.Context
	told groupTold

	backends []driver.Backend
	eng      *engine.Engine
	pools    *groupMemory
	mux      *handoff.Mux
	peers    []*engine.Peer // of the other group
	side     *layout.Side
	// by data-parallel group of the other side
	senders   []*handoff.GroupSender
	receivers []*handoff.GroupReceiver

	flights []*groupFlight // of the round
	work    sync.WaitGroup
	res     groupRankResult
}

// GroupRank is the process of one rank of either group.
func GroupRank(c *proc.Control, open OpenFunc) (err error) {
	r := &groupRank{c: c, ctx: c.Context()}
	if err := c.Expect(kindPlan, &r.told); err != nil {
		return err
	}
	p := &r.told.Plan
	r.eng, r.backends, err = openEngine(open, fmt.Sprintf("%s-%d", r.told.Side, r.told.Index),
		p.Backend, p.Threads, p.limit(), p.Faults[r.told.Side])
	if err != nil {
		return err
	}
	r.mux = handoff.NewMux(r.eng)
	err = r.meet()
	if err == nil {
		err = r.rounds()
	}
	err = errors.Join(err, r.closeGroup())
	r.work.Wait()
	r.mux.Close()
	err = errors.Join(err, r.eng.Close())
	if r.pools != nil {
		err = errors.Join(err, r.pools.close())
	}
	return err
}

// meet makes the memory and connects to all ranks of the other group.
func (r *groupRank) meet() error {
	group, poison := &r.told.Plan.Prefill, prefillPoison
	if r.told.Side == DecodeSide {
		group, poison = &r.told.Plan.Decode, decodePoison
	}
	sides, err := allSides(group, r.told.Plan.Spec)
	if err != nil {
		return err
	}
	r.side = sides[r.told.Index]
	if r.pools, err = newGroupMemory(r.eng, r.side, poison, r.told.Plan.Seed); err != nil {
		return err
	}
	description, err := r.eng.Describe()
	if err != nil {
		return err
	}
	encoded, err := r.side.Marshal()
	if err != nil {
		return err
	}
	if err := r.c.Send(kindMeet, groupMeeting{description, encoded}); err != nil {
		return err
	}
	var all groupPeers
	if err := r.c.Expect(kindPeers, &all); err != nil {
		return err
	}
	others := all.Decode
	if r.told.Side == DecodeSide {
		others = all.Prefill
	}
	if err := r.connect(others); err != nil {
		return err
	}
	if err := r.c.Send(kindConnected, nil); err != nil {
		return err
	}
	if err := r.c.Expect(kindOpen, nil); err != nil {
		return err
	}
	if err := r.open(&all); err != nil {
		return err
	}
	return r.c.Send(kindReady, nil)
}

// connect connects to all ranks at once.
func (r *groupRank) connect(others []groupMeeting) error {
	r.peers = make([]*engine.Peer, len(others))
	errs := make([]error, len(others))
	var all sync.WaitGroup
	for i := range others {
		all.Go(func() { r.peers[i], errs[i] = r.eng.Connect(r.ctx, others[i].Description) })
	}
	all.Wait()
	return errors.Join(errs...)
}

// open makes the plans of the sides that all ranks have told of, one for each data-parallel group
// of the other side, and hears their messages.
func (r *groupRank) open(all *groupPeers) error {
	own, others := all.Prefill, all.Decode
	if r.told.Side == DecodeSide {
		own, others = others, own
	}
	mine, _, err := sidesIn(own, r.side.DP)
	if err != nil {
		return err
	}
	for dp, at := 0, 0; at < len(others); dp++ {
		theirs, peers, err := sidesIn(others, dp)
		if err != nil {
			return err
		}
		senders, receivers := mine, theirs
		if r.told.Side == DecodeSide {
			senders, receivers = receivers, senders
		}
		plan, err := layout.NewPlan(senders, receivers)
		if err != nil {
			return err
		}
		if err := r.openGroup(plan, r.peers[peers[0]:peers[1]]); err != nil {
			return err
		}
		at = peers[1]
	}
	return r.explain()
}

// sidesIn returns the ranks of one data-parallel group, and where they are in the list.
func sidesIn(list []groupMeeting, dp int) (sides []*layout.Side, at [2]int, err error) {
	for i, m := range list {
		s, err := layout.ParseSide(m.Side)
		if err != nil {
			return nil, at, err
		}
		if s.DP == dp {
			sides, at[1] = append(sides, s), i+1
		}
	}
	at[0] = at[1] - len(sides)
	return sides, at, nil
}

// openGroup hears the messages of one group.
func (r *groupRank) openGroup(plan *layout.Plan, peers []*engine.Peer) error {
	limit := patience(r.told.Plan.limit(), r.told.Plan.Faults)
	cfg := handoff.GroupConfig{Plan: plan, Index: r.side.Rank, Regions: r.pools.regions,
		Peers: peers, Route: routeOf(r.told.Plan.Backend), Limits: handoff.Limits{
			MeetTimeout: limit, IdleTimeout: limit, LayerTimeout: limit, TakenTimeout: limit,
			NotifyTimeout: limit,
			RevokeTimeout: min(limit, 15*time.Second)}}
	if r.told.Plan.Digest {
		cfg.Digest = func(int) bool { return true }
	}
	if r.told.Side == PrefillSide {
		s, err := handoff.NewGroupSender(r.mux, cfg)
		if err == nil {
			r.senders = append(r.senders, s)
		}
		return err
	}
	q, err := handoff.NewGroupReceiver(r.mux, cfg)
	if err == nil {
		r.receivers = append(r.receivers, q)
	}
	return err
}

// explain notes which way bytes go between this rank and the first of the other group.
func (r *groupRank) explain() error {
	if r.res.Route = routeOf(r.told.Plan.Backend).Only; r.res.Route != "" {
		return nil
	}
	for _, region := range r.pools.regions {
		if region == nil {
			continue
		}
		remote, err := r.peers[0].Remote(region.Name())
		if err != nil {
			continue // that rank has none of these layers
		}
		x, err := r.eng.Explain(r.peers[0], region, remote)
		if err != nil {
			return err
		}
		r.res.Route = x.Chosen
		return nil
	}
	return nil
}

// closeGroup hears the others no more. It may be called again.
func (r *groupRank) closeGroup() error {
	var errs []error
	for _, s := range r.senders {
		errs = append(errs, s.Close())
	}
	for _, q := range r.receivers {
		errs = append(errs, q.Close())
	}
	return errors.Join(errs...)
}
