// SPDX-License-Identifier: Apache-2.0

package proc

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestHost(t *testing.T) {
	a, err := Host()
	require.NoError(t, err)
	b, err := Host()
	require.NoError(t, err)
	require.Equal(t, a, b)
	require.NotZero(t, a)
}
