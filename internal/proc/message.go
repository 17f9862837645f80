// SPDX-License-Identifier: Apache-2.0

package proc

import (
	"encoding/json"
	"fmt"
	"io"
	"sync"
)

// Message is one line between parent and child.
type Message struct {
	Kind string          `json:"kind"`
	Body json.RawMessage `json:"body,omitempty"`
}

// The kinds that this package uses itself; all others belong to the commands.
const (
	KindAlive = "alive" // child to parent, each AliveEvery
	KindError = "error" // child to parent: the last message of a child that fails
)

// Decode reads the body into v.
func (m *Message) Decode(v any) error {
	if err := json.Unmarshal(m.Body, v); err != nil {
		return fmt.Errorf("read %q message: %w", m.Kind, err)
	}
	return nil
}

// writer sends messages; any goroutine may.
type writer struct {
	mu sync.Mutex
	to io.Writer
}

func (w *writer) send(kind string, body any) error {
	m := Message{Kind: kind}
	if body != nil {
		b, err := json.Marshal(body)
		if err != nil {
			return fmt.Errorf("write %q message: %w", kind, err)
		}
		m.Body = b
	}
	line, err := json.Marshal(m)
	if err != nil {
		return fmt.Errorf("write %q message: %w", kind, err)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if _, err := w.to.Write(append(line, '\n')); err != nil {
		return fmt.Errorf("write %q message: %w", kind, err)
	}
	return nil
}
