// SPDX-License-Identifier: Apache-2.0

package drivertest

import (
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/sluicehq/sluice/internal/testing/promise"
)

// The flags of the stress, which every test binary of a backend has.
var (
	stressFor = flag.Duration("drivertest.stress", 0, "how long FenceStress runs over each "+
		"harness; 0 is for 12 rounds")
	stressSeed = flag.Uint64("drivertest.seed", 0, "of FenceStress; 0 is always the same for "+
		"12 rounds, and else drawn")
)

// stressRounds is how many rounds FenceStress has without a time.
const stressRounds = 12

// stressBlock bounds one run of FenceStress with one pair of processes.
const stressBlock = 10 * time.Second

var stressChecks = []check{
	{name: "FenceStress", wirings: Processes, meets: true, run: checkFenceStress, repeats: true},
}

// repeat performs a check until the time of the stress is over.
func (c check) repeat(t *testing.T, h Harness, w Wiring) {
	if *stressFor == 0 {
		c.perform(t, h, w)
		return
	}
	end := time.Now().Add(*stressFor)
	for first := true; first || time.Now().Before(end) && !t.Failed(); first = false {
		t.Run(time.Now().Format("15:04:05"), func(t *testing.T) { c.perform(t, h, w) })
	}
}

// The leases of one round. Parts lie in one memory, beside the steady ones; the others are
// memories of their own, which are given back once they were revoked.
const (
	leaseLen    = 4096
	leaseParts  = 22
	leaseOwn    = 4
	leaseSteady = 4
)

// storm is what the owner has of the stress.
type storm struct {
	*stage
	random  *rand.Rand
	seed    uint64
	back    int // the far side's peer
	local   int // the far side's region
	whole   int
	steady  [][]byte // tokens
	frozen  int      // rounds in which the writer stood still during the revokes
	broken  int      // in which connections broke before them
	killed  int      // in which the writer was killed
	written int
}

// lease is memory that the writer writes to.
type lease struct {
	id    int
	own   bool
	token []byte
	seed  uint64 // of what it must hold from the revoke on
}

// checkFenceStress has many movers of one process write to many leases, stops the process
// at any moment, revokes the leases, gives them to others, and lets the process go on, or
// kills it. Imports go on beside, and connections break. Once Revoke has returned nil no byte of
// the writer may land.
func checkFenceStress(s *stage) {
	seed := *stressSeed
	if seed == 0 && *stressFor > 0 {
		seed = uint64(time.Now().UnixNano())
	}
	s.Logf("go test -drivertest.seed=%d", seed)
	st := &storm{stage: s, random: rand.New(rand.NewPCG(seed, 1)), seed: seed}
	st.prepare()
	st.whole = s.home.must(request{Do: "add", Len: (leaseParts + leaseSteady) * leaseLen,
		Remote: true}).ID
	for i := range uint64(leaseSteady) {
		part := request{Do: "slice", Region: st.whole, Off: (leaseParts + i) * leaseLen,
			Len: leaseLen}
		st.steady = append(st.steady, s.home.must(part).Data)
	}
	rounds := 0
	end := time.Now().Add(min(*stressFor, stressBlock))
	for more := true; more && !s.Failed(); rounds++ {
		st.round(rounds)
		more = rounds+1 < stressRounds || *stressFor > 0 && time.Now().Before(end)
	}
	s.Logf("%d rounds, %d with a writer that stood still, %d with connections that broke, %d "+
		"with a writer "+
		"that was killed, %d writes", rounds, st.frozen, st.broken, st.killed, st.written)
}

// prepare has a far side that was just started ready for rounds.
func (st *storm) prepare() {
	st.Helper()
	st.back = st.far.must(request{Do: "connect", Data: st.near.b.Addr()}).ID
	st.local = st.far.must(request{Do: "add", Len: 2 * leaseLen}).ID
	st.far.must(request{Do: "paint", Region: st.local, Len: 2 * leaseLen, Seed: 1 << 40})
}

// leases registers those of one round.
func (st *storm) leases() (list []*lease) {
	st.Helper()
	for i := range uint64(leaseParts + leaseOwn) {
		l := &lease{own: i >= leaseParts, seed: st.stage.seed()}
		q := request{Do: "slice", Region: st.whole, Off: i * leaseLen, Len: leaseLen}
		if l.own {
			q = request{Do: "add", Len: leaseLen, Remote: true}
		}
		r := st.home.must(q)
		l.id, l.token = r.ID, r.Data
		list = append(list, l)
	}
	return list
}

func (st *storm) round(number int) {
	st.Helper()
	list := st.leases()
	lossy := st.h.Disturb != nil && st.random.IntN(6) == 0
	q := request{Do: "storm", Peer: st.back, Region: st.local, Seed: st.random.Uint64(),
		Steady: st.steady, Lossy: lossy}
	for _, l := range list {
		q.Tokens = append(q.Tokens, l.token)
	}
	st.far.must(q)
	time.Sleep(time.Duration(st.random.IntN(6000)) * time.Microsecond)
	freeze := st.random.IntN(8) > 0
	if freeze {
		st.frozen++
		st.ok(st.proc.freeze())
	}
	mend := func() {}
	if lossy {
		st.broken++
		mend = st.h.Disturb(st.near.b, st.random)
	}
	st.revokeAll(number, list)
	for _, l := range list {
		st.reuse(l)
	}
	mend()
	st.finish(number, freeze, lossy)
	for i, l := range list {
		sum := st.home.must(request{Do: "digest", Region: l.id, Len: leaseLen}).Data
		if string(sum) != string(digest(painted(leaseLen, l.seed))) {
			got := st.home.must(request{Do: "get", Region: l.id, Len: leaseLen}).Data
			promise.Breaks(st, "seed %d, round %d, lease %d (writer stood still: %v): bytes "+
				"landed behind the revoke: %s", st.seed, number, i, freeze,
				difference(got, painted(leaseLen, l.seed)))
		}
		st.home.must(request{Do: "give back", Region: l.id})
	}
}

// finish lets the writer go on until it has nothing left to write, or kills it.
func (st *storm) finish(number int, frozen, lossy bool) {
	st.Helper()
	if st.random.IntN(24) == 0 {
		st.killed++
		st.ok(st.proc.kill())
		st.startFar()
		st.prepare()
		return
	}
	if frozen {
		st.ok(st.proc.thaw())
	}
	o := st.far.must(request{Do: "ended"})
	st.written += o.Count
	for _, fault := range o.Faults {
		st.Errorf("seed %d, round %d: far side: %s", st.seed, number, fault)
	}
	if lossy {
		st.far.must(request{Do: "close peer", Peer: st.back})
		st.back = st.far.must(request{Do: "connect", Data: st.near.b.Addr()}).ID
	}
}

// revokeAll revokes all leases side by side, begun in any order.
func (st *storm) revokeAll(number int, list []*lease) {
	st.Helper()
	var all sync.WaitGroup
	errs := make([]error, len(list))
	for _, i := range st.random.Perm(len(list)) {
		all.Go(func() {
			_, errs[i] = st.home.try(request{Do: "revoke", Region: list[i].id})
		})
	}
	all.Wait()
	st.ok(errors.Join(errs...), "seed %d, round %d: revoke", st.seed, number)
}

// reuse gives the range of a lease to another use: it is painted; memory of its own is given
// back before, and other memory comes in its place.
func (st *storm) reuse(l *lease) {
	st.Helper()
	if l.own {
		st.home.must(request{Do: "give back", Region: l.id})
		l.id = st.home.must(request{Do: "add", Len: leaseLen, Remote: true}).ID
	}
	st.home.must(request{Do: "paint", Region: l.id, Len: leaseLen, Seed: l.seed})
}

// giveBack ends a registration, and the memory if it is the region's own.
func (h *host) giveBack(id int, limit time.Duration) error {
	r := h.region(id)
	if err := h.revoke(id, limit); err != nil {
		return fmt.Errorf("revoke memory: %w", err)
	}
	if !r.owned {
		return nil
	}
	return r.space.free()
}
