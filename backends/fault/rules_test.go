// SPDX-License-Identifier: Apache-2.0

package fault

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
)

func TestCheckRefusesWhatCannotBe(t *testing.T) {
	for _, r := range []Rule{
		{}, {On: Write}, {Do: Drop()}, {On: Write | Read, Do: Drop()},
		{On: 1 << events, Do: Drop()},
		{On: Connect, Do: Drop()}, {On: Write, Do: Drop(), Chance: 2}, {On: Write, Do: Fail(nil)},
		{On: Write, Do: Limit(0, 0)}, {On: Write, Do: Model(0, 0, 0)},
		{On: Write, Do: Delay(-1, 0)}, {On: Write, Do: Stall(TimeMax + 1)},
		{On: Receive, Do: Delay(0, 0), Peer: AtLeast(1)},
		{On: Connect, Do: Delay(0, 0), Size: AtLeast(1)},
	} {
		require.ErrorIs(t, checkRules([]Rule{r}), driver.ErrBounds, "%+v", r)
	}
	require.ErrorIs(t, checkRules(make([]Rule, RulesMax+1)), driver.ErrBounds)
}
