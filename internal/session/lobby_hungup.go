// SPDX-License-Identifier: Apache-2.0

package session

import (
	"errors"
	"io"
	"slices"
	"syscall"
	"time"
)

// Between tries to connect to a listener that hung up there is a pause, which grows.
const AcceptPauseMin, AcceptPauseMax = 20 * time.Millisecond, time.Second

// HungUp reports whether a handshake failed because the other side ended the connection without a
// word: it was late, or too many waited there. A later try may do better.
func HungUp(err error) bool {
	return slices.ContainsFunc([]error{io.EOF, io.ErrUnexpectedEOF, syscall.ECONNRESET,
		syscall.EPIPE}, func(is error) bool { return errors.Is(err, is) })
}
