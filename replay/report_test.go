// SPDX-License-Identifier: Apache-2.0

package replay

import (
	"bytes"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestReportOfFaults: where rules were given, the report says what they did, be it nothing.
func TestReportOfFaults(t *testing.T) {
	for _, c := range []struct {
		rules map[Side]string
		says  bool
	}{{nil, false}, {map[Side]string{PrefillSide: "slow"}, true}} {
		var out bytes.Buffer
		r := merge(&Plan{Faults: c.rules}, &PrefillResult{}, &DecodeResult{}, 0)
		require.NoError(t, r.Text(&out))
		const line = "faults      0 brought about, 0 hand-overs begun again\n"
		require.Equal(t, c.says, bytes.Contains(out.Bytes(), []byte(line)), out.String())
	}
}
