// SPDX-License-Identifier: Apache-2.0

package handoff

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/kv/layout"
)

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
