// SPDX-License-Identifier: Apache-2.0

package figures

import (
	"bytes"
	"sync"
)

// Tail keeps the last bytes that were written, as a process that is watched writes them.
type Tail struct {
	mu sync.Mutex
	b  []byte
}

const tailMax = 64 << 10

// Write implements io.Writer.
func (t *Tail) Write(p []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.b = append(t.b, p...)
	if over := len(t.b) - tailMax; over > 0 {
		t.b = append(t.b[:0], t.b[over:]...)
	}
	return len(p), nil
}

// Bytes returns a copy of what is kept.
func (t *Tail) Bytes() []byte {
	t.mu.Lock()
	defer t.mu.Unlock()
	return bytes.Clone(t.b)
}
