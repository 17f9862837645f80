// SPDX-License-Identifier: Apache-2.0

package lobby

import (
	"fmt"
	"io"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestLate is of a connection that ended without a word, and not at once.
func TestLate(t *testing.T) {
	for _, err := range []error{io.EOF, syscall.ECONNRESET} {
		err = fmt.Errorf("read: %w", err)
		require.True(t, Late(err, Meant))
		require.False(t, Late(err, Meant-1))
	}
	require.False(t, Late(syscall.ECONNREFUSED, Meant))
}
