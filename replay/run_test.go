// SPDX-License-Identifier: Apache-2.0

package replay

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/backends/fault"
	"github.com/sluicehq/sluice/backends/shm"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/internal/proc"
	"github.com/sluicehq/sluice/kv/handoff"
	"github.com/sluicehq/sluice/kv/layout"
	"github.com/sluicehq/sluice/kv/trace"
)

// rankRole makes the test binary a rank.
const rankRole = "replay-rank"

func TestMain(m *testing.M) {
	if len(os.Args) != 2 || os.Args[1] != rankRole {
		os.Exit(m.Run())
	}
	c, err := proc.Attach()
	if err == nil {
		err = Rank(c, func(string, int) ([]driver.Backend, error) {
			b, err := shm.New(shm.Config{})
			return []driver.Backend{b}, err
		})
		if err != nil && c.Context().Err() == nil {
			_ = c.Send(proc.KindError, err.Error())
		}
	}
	if err != nil {
		os.Exit(1)
	}
}

// parsed reads a group.
func parsed(t *testing.T, text string) layout.GroupSpec {
	t.Helper()
	g, err := layout.ParseGroup(text)
	require.NoError(t, err)
	return g
}

func init() {
	faultSets["all-corrupt"] = []fault.Rule{{On: fault.Write, Every: 2, Do: fault.BreakCorrupt()},
		{On: fault.Read, Every: 2, Do: fault.BreakCorrupt()}}
	faultSets["bad-ends"] = []fault.Rule{
		{On: fault.Read, Skip: 12, Chance: 0.1, Do: fault.Fail(driver.ErrPeerLost)},
		{On: fault.Message, Chance: 0.1, Do: fault.Late(2*time.Millisecond, 0)},
		{On: fault.Batch, Skip: 30, Chance: 0.1, Most: 1, Do: fault.Swallow()}}
}

// lengths are requests of so many tokens.
func lengths(tokens ...int) (list []trace.Request) {
	for _, n := range tokens {
		list = append(list, trace.Request{InputLength: n})
	}
	return list
}

// smallGroups is a small replay of two layers, in which all ranks meet faults.
func smallGroups(t *testing.T, faults string) Options {
	t.Helper()
	spec, err := layout.LookupSpec("llama3.1-8b")
	require.NoError(t, err)
	o := Options{Spec: spec, Prefill: parsed(t, "tp=2,layout=nhd,block=16"),
		Decode: parsed(t, "tp=1,pp=2,layout=hnd,block=64"), Backend: "shm", Scale: 16, Digest: true,
		Requests: lengths(100, 65, 64, 1, 90, 33), Threads: 1, Limit: 20 * time.Second, Seed: 3,
		Start: func(s Side, rank int) (*proc.Child, error) {
			return proc.StartChild(fmt.Sprint(s, " rank ", rank), []string{rankRole})
		}}
	if faults != "" {
		o.Faults = map[Side]string{PrefillSide: faults, DecodeSide: faults}
	}
	return o
}

func TestGroups(t *testing.T) {
	o := smallGroups(t, "")
	o.HitRate = 1 // but for the request of one token
	r, err := Run(t.Context(), o)
	require.NoError(t, err)
	require.NoError(t, r.Err())
	require.Equal(t, [3]int{6, 0, 0}, [3]int{r.Finished, r.Aborted, r.Failed})
	require.Equal(t, 5, r.Hits)
	require.Positive(t, r.HitTokens)
	require.EqualValues(t, (100+65+64+1+90+33-r.HitTokens)*4096*2, r.Bytes)
	require.Greater(t, r.Checked, 2*r.Bytes)
	require.Positive(t, r.GBps)
	var out bytes.Buffer
	require.NoError(t, r.Text(&out))
	require.Contains(t, out.String(), "llama3.1-8b, 2 of 32 layers")
	require.Contains(t, out.String(), "mismatches  0 of ")
	require.NotContains(t, out.String(), "killed")
}

// TestGroupsFindWhatIsCorrupt: digests find it before a rank is told that a layer is there. Without
// them it is found by its coordinates.
func TestGroupsFindWhatIsCorrupt(t *testing.T) {
	for _, digest := range []bool{true, false} {
		o := smallGroups(t, "all-corrupt")
		o.Digest = digest
		r, err := Run(t.Context(), o)
		require.NoError(t, err)
		require.Positive(t, r.Mismatches)
		require.Equal(t, digest, len(r.FirstMismatches) == 0)
		require.Equal(t, digest, r.Failed > 0)
		require.Zero(t, r.Leaked)
		require.ErrorContains(t, r.Err(), "mismatches")
	}
}

// TestGroupsUnderFaults: requests whose bytes or messages are lost are handed over again, and
// nothing else than what has come is ready, before the requests or after them.
func TestGroupsUnderFaults(t *testing.T) {
	o := smallGroups(t, "bad-ends")
	o.HitRate, o.Limit = 0.5, 20*time.Second // a quarter of it for what is swallowed
	r, err := Run(t.Context(), o)
	require.NoError(t, err)
	require.NoError(t, r.Err())
	require.Positive(t, r.Faults)
	require.Positive(t, r.Retried)
	require.Equal(t, 6, r.Finished)
	var out bytes.Buffer
	require.NoError(t, r.Text(&out))
	require.Regexp(t, `\nfaults      [1-9]\d*, [1-9]\d* hand-overs begun again\n`, out.String())
}

// TestGroupReportText: of what was not asked for it has no line; rules that met nothing have one.
func TestGroupReportText(t *testing.T) {
	r := Report{PrefillRanks: 8, DecodeRanks: 1, groups: [2]int{2, 1}}
	text := func() string {
		var out bytes.Buffer
		require.NoError(t, r.Text(&out))
		return out.String()
	}
	require.Contains(t, text(), ": 4 ranks in each of 2 data-parallel groups\n")
	require.Contains(t, text(), ": 1 rank\n")
	for _, line := range []string{"prefixes", "killed", "failed  ", "faults"} {
		require.NotContains(t, text(), "\n"+line)
	}
	r.faulty = true
	require.Contains(t, text(), "faults      0: no rule met an event\n")
}

// TestGroupExcuses: what nothing can have brought about is a defect, also while rules are at work.
func TestGroupExcuses(t *testing.T) {
	defect := errors.New("a defect")
	end := func(remote bool, r handoff.Reason, cause error) error {
		return errors.Join(&handoff.EndError{Remote: remote, Reason: r, Err: cause})
	}
	const none, faulty, ends, kill = "", "failing", "abort", "kill"
	for what, c := range map[string]struct {
		err  error
		when []string // it is planned
	}{
		"a defect":       {defect, nil},
		"one in a push":  {end(false, handoff.Failed, defect), nil},
		"in a message":   {end(false, handoff.Garbled, nil), nil},
		"one it noticed": {end(true, handoff.Garbled, nil), nil},
		"other spans":    {end(true, handoff.OtherSpan, nil), nil},
		"elsewhere":      {end(true, handoff.Failed, nil), []string{faulty}},
		"no rule":        {end(false, handoff.Failed, engine.ErrBounds), nil},
		"no proof":       {end(false, handoff.Failed, engine.ErrUnproven), []string{faulty}},
		"late":           {end(false, handoff.TimedOut, nil), []string{faulty}},
		"lost":           {end(false, handoff.PeerLost, nil), []string{faulty, kill}},
		"ended":          {end(true, handoff.Aborted, nil), []string{faulty, ends}},
		"cancelled":      {end(false, handoff.Cancelled, nil), []string{faulty, ends}},
	} {
		for _, when := range []string{none, faulty, ends, kill} {
			p, q := &plan{}, &request{}
			switch when {
			case faulty:
				p.Faults = map[Side]string{DecodeSide: faulty}
			case ends:
				q.Abort = &abort{}
			}
			require.Equal(t, slices.Contains(c.when, when), p.excuses(q, when == kill, c.err),
				"%s, %q", what, when)
		}
	}
}

// TestGroupsWithAborts: the ends of some requests may come too late, but never for half of them.
func TestGroupsWithAborts(t *testing.T) {
	for _, kill := range []Side{"", PrefillSide, DecodeSide} {
		o := smallGroups(t, "")
		o.AbortRate, o.HitRate, o.Kill = 1, 1, kill
		r, err := Run(t.Context(), o)
		require.NoError(t, err)
		require.NoError(t, r.Err())
		require.Equal(t, 6, r.Finished+r.Aborted+r.Failed)
		require.GreaterOrEqual(t, r.Aborted, 2)
		require.Positive(t, r.UsedAgain)
		require.Equal(t, kill != "", r.Failed == atOnceMax)
		require.Equal(t, kill != "", r.SlowestEndMs > 0)
		require.Contains(t, r.Killed, string(kill))
	}
}

func TestGroupPlan(t *testing.T) {
	o := smallGroups(t, "")
	o.Requests = lengths(slices.Repeat([]int{9000}, 40)...)
	o.Scale, o.AbortRate, o.HitRate = 0, 0.2, 0.25
	p, err := o.plan()
	require.NoError(t, err)
	require.Equal(t, 40, p.cut)
	require.LessOrEqual(t, p.memory, uint64(PoolsBytes))
	require.Greater(t, p.memory*uint64(p.layers+1)/uint64(p.layers), uint64(PoolsBytes))
	by, hits, inBlock := map[Side]int{}, 0, 0
	for _, round := range p.rounds {
		for _, q := range round {
			require.EqualValues(t, TokensMax, q.Tokens)
			if q.Abort != nil {
				by[q.Abort.By]++
			}
			if q.From > 0 {
				require.Less(t, q.From, q.Tokens)
				if hits++; q.From%16 == 0 && q.From%64 != 0 {
					inBlock++ // of the decode side, at the end of one of the prefill side
				}
			}
		}
	}
	require.Equal(t, map[Side]int{PrefillSide: 4, DecodeSide: 4}, by)
	require.Equal(t, 10, hits)
	require.Positive(t, inBlock)

	o.Memory = 1 << 20
	_, err = o.plan()
	require.ErrorContains(t, err, "use fewer --tokens")
	o.Scale = 32
	_, err = o.plan()
	require.ErrorContains(t, err, "1 layers are too few for 1 and 2 stages")
}

// TestGroupsOfDataParallelRanks deals requests out between two prefill and three decode groups.
func TestGroupsOfDataParallelRanks(t *testing.T) {
	for _, kill := range []Side{"", PrefillSide, DecodeSide} {
		o := smallGroups(t, "")
		o.Prefill.DP, o.Decode.DP, o.HitRate, o.Kill = 2, 3, 1, kill
		o.Requests = append(o.Requests, lengths(40, 50)...)
		p, err := o.plan()
		require.NoError(t, err)
		pairs := map[[2]int]bool{}
		for _, q := range slices.Concat(p.rounds...) {
			pairs[q.DP] = true
		}
		require.Len(t, pairs, 6)
		r, err := Run(t.Context(), o)
		require.NoError(t, err)
		require.NoError(t, r.Err())
		require.Equal(t, [2]int{4, 6}, [2]int{r.PrefillRanks, r.DecodeRanks})
		require.Equal(t, 8, r.Finished+r.Failed)
		require.Equal(t, kill != "", r.Failed == atOnceMax)
		if kill == "" {
			require.EqualValues(t, (100+65+64+1+90+33+40+50-r.HitTokens)*4096*2, r.Bytes)
		}
	}
}

// TestCutStages keeps proportions, and a layer in each stage.
func TestCutStages(t *testing.T) {
	for _, c := range []struct{ cuts, want []int }{
		{[]int{20, 60}, []int{2, 6}}, {[]int{1, 79}, []int{1, 7}}, {[]int{79, 1}, []int{7, 1}},
		{[]int{1, 1, 1, 1, 1, 1, 1, 73}, []int{1, 1, 1, 1, 1, 1, 1, 1}}, {nil, nil},
	} {
		require.Equal(t, c.want, cutStages(layout.GroupSpec{Cuts: c.cuts}, 80, 8).Cuts)
	}
}

// streamed is a stream of requests of some blocks each, by their hashes.
func streamed(t *testing.T, model string, blocks ...[]uint64) Options {
	t.Helper()
	o := smallGroups(t, "")
	var err error
	o.Spec, err = layout.LookupSpec(model)
	require.NoError(t, err)
	o.Prefill, o.Decode = parsed(t, "tp=1,block=512"), parsed(t, "tp=1,block=512")
	o.Requests, o.Scale, o.Digest, o.Stream = nil, 0, false, true
	for _, ids := range blocks {
		o.Requests = append(o.Requests, trace.Request{InputLength: len(ids) * trace.BlockTokens,
			HashIDs: ids})
	}
	return o
}

const indexer, indexerBlock = "deepseek-v3.2-indexer", 61 * 132 * 512

// TestStream: blocks that the decode has are not handed over again, also where a request has one
// twice, or all of its blocks are there; the oldest make way.
func TestStream(t *testing.T) {
	o := streamed(t, indexer, []uint64{1, 2, 3}, []uint64{1, 2}, []uint64{1, 2, 4, 4},
		[]uint64{9, 2, 3, 7}, []uint64{1, 2, 3})
	o.PoolBytes = 5 * indexerBlock
	r, err := Run(t.Context(), o)
	require.NoError(t, err)
	require.NoError(t, r.Err())
	require.Equal(t, 5, r.Finished)
	// Behind the third request the pool holds 1 to 4; the fourth needs four blocks of it, and 3, 1
	// and 2 go first.
	require.EqualValues(t, (3+0+2+4+3)*indexerBlock, r.Bytes)
	require.EqualValues(t, 4*512, r.HitTokens)
	require.Equal(t, 2, r.Hits)
	require.Positive(t, r.Ratio)
	require.Positive(t, r.LayerUs.P50)
	require.Positive(t, r.RequestMs.P50)
}

// TestStreamWithAborts: each is ended, by either side in turn, also where all blocks are there.
func TestStreamWithAborts(t *testing.T) {
	o := streamed(t, indexer, []uint64{1, 2}, []uint64{1, 2}, []uint64{1, 2}, []uint64{1, 2})
	o.AbortRate = 0.5
	r, err := Run(t.Context(), o)
	require.NoError(t, err)
	require.NoError(t, r.Err())
	require.Equal(t, [2]int{2, 2}, [2]int{r.Finished, r.Aborted})
	require.Positive(t, r.Watched)
}

// TestStreamFindsWhatIsCorrupt: by its block's hash, layer and token.
func TestStreamFindsWhatIsCorrupt(t *testing.T) {
	o := streamed(t, indexer, []uint64{1, 2})
	o.Faults = map[Side]string{PrefillSide: "corrupt"}
	r, err := Run(t.Context(), o)
	require.NoError(t, err)
	require.ErrorContains(t, r.Err(), "mismatches")
	require.NotEmpty(t, r.FirstMismatches)
}

func TestChoosePool(t *testing.T) {
	o := streamed(t, indexer, []uint64{1}, []uint64{1, 2, 3, 4, 5, 6, 7, 8, 9, 10})
	for name, c := range map[string]struct {
		bytes, available uint64
		want             uint32 // 0: an error that contains says
		says             string
	}{
		"more than the largest":                 {0, 1000 * indexerBlock, 15, ""},
		"a third of the memory":                 {0, 39 * indexerBlock, 13, ""},
		"at least the largest":                  {0, 22 * indexerBlock, 10, ""},
		"nobody knows how much memory there is": {0, 0, 15, ""},
		"not enough memory":                     {0, 9 * indexerBlock, 0, "available"},
		"not enough for the prefill":            {0, 19 * indexerBlock, 0, "available"},
		"as asked for":                          {13 * indexerBlock, 1000 * indexerBlock, 13, ""},
		"too little": {9 * indexerBlock, 1000 * indexerBlock, 0,
			"request 2 needs 10 blocks"},
		"too much": {50 * indexerBlock, 40 * indexerBlock, 0, "available"},
	} {
		p, longest := &plan{}, &request{Number: 2, Hashes: o.Requests[1].HashIDs}
		o.PoolBytes = c.bytes
		err := p.choosePool(&o, longest, c.available)
		if c.want == 0 {
			require.ErrorContains(t, err, c.says, name)
			continue
		}
		require.NoError(t, err, name)
		require.Equal(t, c.want, p.Decode.Blocks, name)
	}
	require.Equal(t, "4MiB", poolSize(3<<20+1))
}

func TestBaselineCopiesEveryPiece(t *testing.T) {
	pieces := make([][]byte, 10)
	for i := range pieces {
		pieces[i] = bytes.Repeat([]byte{byte(i + 1)}, 4096)
	}
	for _, threads := range []int{1, 3} {
		b, err := newBaseline(10*4096, threads)
		require.NoError(t, err)
		b.run(pieces)
		b.run(pieces) // begins at the start again
		require.EqualValues(t, 2*10*4096, b.bytes)
		require.Positive(t, b.took)
		require.Equal(t, bytes.Join(pieces, nil), b.memory.Bytes())
		require.NoError(t, b.memory.Close())
	}
}
