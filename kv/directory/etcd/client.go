// SPDX-License-Identifier: Apache-2.0

package etcd

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"
	"sync/atomic"
	"time"

	"github.com/sluicehq/sluice/engine"
)

// client speaks to the members of an etcd by the JSON gateway that each of them has: a POST for a
// call, with bytes in base64 and numbers of 64 bits in quotes. etcd documents it at
// https://etcd.io/docs/v3.4/dev-guide/api_grpc_gateway/.
type client struct {
	endpoints []string
	http      *http.Client
	answers   atomic.Int32 // the endpoint that has answered last
}

const (
	callLimit   = 2 * time.Second // of one call to one member
	answerMax   = 32 << 20        // bytes of an answer, or of one message of a watch
	errorMax    = 1 << 10         // bytes of the text of an error that are kept
	endpointMax = 64
)

// number is an int64, which JSON has in quotes.
type number int64

// MarshalJSON implements json.Marshaler.
func (n number) MarshalJSON() ([]byte, error) { return fmt.Appendf(nil, `"%d"`, n), nil }

// UnmarshalJSON implements json.Unmarshaler.
func (n *number) UnmarshalJSON(text []byte) error {
	return json.Unmarshal(bytes.Trim(text, `"`), (*int64)(n))
}

type header struct {
	Revision number `json:"revision"`
}

type keyValue struct {
	Key         []byte `json:"key"`
	Value       []byte `json:"value"`
	ModRevision number `json:"mod_revision"`
}

type rangeRequest struct {
	Key       []byte `json:"key"`
	RangeEnd  []byte `json:"range_end,omitempty"`
	Limit     number `json:"limit,omitempty"`
	CountOnly bool   `json:"count_only,omitempty"`
}

type rangeAnswer struct {
	Header header     `json:"header"`
	List   []keyValue `json:"kvs"`
	More   bool       `json:"more"`
}

type putRequest struct {
	Key   []byte `json:"key"`
	Value []byte `json:"value"`
	Lease number `json:"lease"`
}

type compare struct {
	Key         []byte  `json:"key"`
	Target      string  `json:"target"`
	Created     *number `json:"create_revision,omitempty"`
	ModRevision *number `json:"mod_revision,omitempty"`
	Lease       *number `json:"lease,omitempty"`
}

type operation struct {
	Put   *putRequest   `json:"request_put,omitempty"`
	Range *rangeRequest `json:"request_range,omitempty"`
}

type txnRequest struct {
	Compare []compare   `json:"compare"`
	Success []operation `json:"success"`
	Failure []operation `json:"failure,omitempty"`
}

type txnAnswer struct {
	Succeeded bool `json:"succeeded"`
	Responses []struct {
		Range rangeAnswer `json:"response_range"`
	} `json:"responses"`
}

type lease struct {
	ID  number `json:"ID"`
	TTL number `json:"TTL"`
}

type event struct {
	Type string   `json:"type"` // "": PUT
	Of   keyValue `json:"kv"`
}

type watchAnswer struct {
	Header   header  `json:"header"`
	Created  bool    `json:"created"`
	Canceled bool    `json:"canceled"`
	Reason   string  `json:"cancel_reason"`
	Events   []event `json:"events"`
}

// stream is an answer of a call that may answer more than once.
type stream[T any] struct {
	Result T                `json:"result"`
	Error  *json.RawMessage `json:"error"`
}

// checkEndpoints says what is wrong with the URLs of an etcd.
func checkEndpoints(list []string) error {
	if len(list) == 0 || len(list) > endpointMax {
		return fmt.Errorf("etcd: %d endpoints, want from 1 to %d: %w", len(list), endpointMax,
			engine.ErrBounds)
	}
	for _, e := range list {
		u, err := url.Parse(e)
		if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" ||
			strings.Trim(u.Path, "/") != "" {
			return fmt.Errorf("etcd endpoint %q: want http://HOST:PORT or https://HOST:PORT: %w", e,
				engine.ErrBounds)
		}
	}
	return nil
}

// post sends a call to one member, and returns its body once it has begun to answer.
func (c *client) post(ctx context.Context, endpoint, call string, in any) (io.ReadCloser, error) {
	body, err := json.Marshal(in)
	if err != nil {
		return nil, err
	}
	q, err := http.NewRequestWithContext(ctx, http.MethodPost,
		strings.TrimRight(endpoint, "/")+"/v3/"+call, bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	q.Header.Set("Content-Type", "application/json")
	a, err := c.http.Do(q)
	if err != nil {
		return nil, fmt.Errorf("etcd: %w", err)
	}
	if a.StatusCode == http.StatusOK {
		return a.Body, nil
	}
	text, _ := io.ReadAll(io.LimitReader(a.Body, errorMax))
	_ = a.Body.Close()
	return nil, &refusal{endpoint, a.StatusCode, string(bytes.TrimSpace(text))}
}

// refusal is the error of a member that has answered.
type refusal struct {
	endpoint string
	status   int
	text     string
}

func (r *refusal) Error() string {
	return fmt.Sprintf("etcd at %s answers %d %s: %s", r.endpoint, r.status,
		http.StatusText(r.status), r.text)
}

// ask is a call to one member that it answers once.
func ask[T any](ctx context.Context, c *client, endpoint, call string, in any) (out T, err error) {
	ctx, cancel := context.WithTimeoutCause(ctx, callLimit,
		fmt.Errorf("%s has not answered within %v", endpoint, callLimit))
	defer cancel()
	body, err := c.post(ctx, endpoint, call, in)
	if err == nil {
		err = json.NewDecoder(io.LimitReader(body, answerMax)).Decode(&out)
		err = errors.Join(err, body.Close())
	}
	if err != nil && ctx.Err() != nil {
		err = context.Cause(ctx)
	}
	return out, err
}

// askAny is ask of the first member that answers, from the one on that has answered last.
func askAny[T any](ctx context.Context, c *client, call string, in any) (out T, err error) {
	var errs []error
	first := int(c.answers.Load())
	for k := range c.endpoints {
		at := (first + k) % len(c.endpoints)
		out, err = ask[T](ctx, c, c.endpoints[at], call, in)
		r, is := errors.AsType[*refusal](err)
		if err == nil || is && r.status < http.StatusInternalServerError {
			c.answers.Store(int32(at))
			return out, err
		}
		errs = append(errs, err)
		if ctx.Err() != nil {
			break
		}
	}
	return out, errors.Join(errs...)
}

// counted reads a stream of messages, each of which is bounded.
type counted struct {
	from io.Reader
	left int
}

// Read implements io.Reader.
func (c *counted) Read(p []byte) (int, error) {
	if c.left <= 0 {
		return 0, fmt.Errorf("etcd sends a message of more than %d bytes: %w", answerMax,
			engine.ErrBounds)
	}
	n, err := c.from.Read(p[:min(len(p), c.left)])
	c.left -= n
	return n, err
}
