// SPDX-License-Identifier: Apache-2.0

package hack

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// TestStacksAreLate: past STACKS_BY the script makes no environment, and says what runs the tests.
func TestStacksAreLate(t *testing.T) {
	for need, status := range map[string]int{"": 0, "required": 1} {
		said := script(t, status, []string{"STACKS_BY=5", "STACKS=" + need}, "./stacks")
		require.Contains(t, said, "past STACKS_BY")
		require.Contains(t, said, "make test-stacks")
	}
}
