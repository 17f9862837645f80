// SPDX-License-Identifier: Apache-2.0

package pair

import (
	"context"
	"fmt"
	"strings"

	"github.com/sluicehq/sluice/internal/procs"
)

// saidError is the error of a child in its own words.
type saidError struct{ name, text string }

func (e *saidError) Error() string { return fmt.Sprintf("%s process: %s", e.name, e.text) }

// childError reads the KindError message of a child.
func childError(c *procs.Child, m *procs.Message) error {
	var text string
	if err := m.Decode(&text); err != nil {
		return err
	}
	return &saidError{c.Name, strings.TrimSpace(text)}
}

// await returns the next message of a child, which must be of that kind, and
// reads its body into v unless v is nil.
func await(ctx context.Context, c *procs.Child, kind string, v any) error {
	for {
		select {
		case <-ctx.Done():
			return fmt.Errorf("wait for the %s process (pid %d): %w", c.Name, c.PID,
				context.Cause(ctx))
		case m, ok := <-c.Messages():
			switch {
			case !ok && c.ExitError() != nil:
				return c.ExitError()
			case !ok:
				return fmt.Errorf("%s process (pid %d) ended early", c.Name, c.PID)
			case m.Kind == procs.KindError:
				return childError(c, &m)
			case m.Kind != kind:
				return fmt.Errorf("%s process sent %q, want %q", c.Name, m.Kind, kind)
			case v == nil:
				return nil
			}
			return m.Decode(v)
		}
	}
}
