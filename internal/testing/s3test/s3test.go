// SPDX-License-Identifier: Apache-2.0

// Package s3test runs object stores for a test, on the loopback alone: a real one, versitygw, where
// the machine has it, and a stand-in.
package s3test

import (
	"bytes"
	"crypto/md5"
	"encoding/xml"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/driver/drivertest"
)

// Key and Secret are who may use a store, in the variables of the usual chain.
const (
	Key    = "AKIATESTTESTTEST"
	Secret = "0123456789abcdef0123456789abcdef01234567"
	Bucket = "blocks"
)

// Environment has this process, and those that it starts, use a store.
func Environment(t *testing.T) {
	t.Setenv("AWS_ACCESS_KEY_ID", Key)
	t.Setenv("AWS_SECRET_ACCESS_KEY", Secret)
	t.Setenv("AWS_SESSION_TOKEN", "")
}

// Real starts versitygw, whose objects are files, with one bucket, and returns its URL. It skips
// the test where the machine does not have it.
func Real(t *testing.T) (url string) {
	t.Helper()
	program, err := exec.LookPath("versitygw")
	if err != nil {
		drivertest.SkipIfUnavailable(t, &driver.UnavailableError{Backend: "versitygw",
			Reason: err.Error(),
			Fix:    "go install github.com/versity/versitygw/cmd/versitygw@latest"})
	}
	dir, meta := t.TempDir(), t.TempDir() // not every filesystem has attributes of users
	if err := os.MkdirAll(filepath.Join(dir, Bucket), 0o755); err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	at := l.Addr().String()
	_ = l.Close()
	c := exec.Command(program, "--access", Key, "--secret", Secret, "--port", at, "posix",
		"--sidecar", meta, dir)
	var output bytes.Buffer
	c.Stdout, c.Stderr = &output, &output
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = c.Process.Kill()
		_ = c.Wait()
		if t.Failed() {
			t.Logf("versitygw:\n%s", output.String())
		}
	})
	for limit := time.Now().Add(time.Minute); ; {
		conn, err := net.DialTimeout("tcp", at, time.Second)
		if err == nil {
			_ = conn.Close()
			return "http://" + at
		}
		if time.Now().After(limit) {
			t.Fatalf("versitygw does not answer: %v", err)
		}
	}
}

// StandIn is a store of one bucket in memory. It checks no signature.
type StandIn struct {
	URL string

	mu      sync.Mutex
	objects map[string][]byte
	uploads map[string]map[int][]byte // parts by upload
	down    bool
	ranges  int // requests for a part of an object
	parts   int // that were written
	instead func(name string)
}

// NewStandIn starts one.
func NewStandIn(t *testing.T) *StandIn {
	s := &StandIn{objects: map[string][]byte{}, uploads: map[string]map[int][]byte{}}
	server := httptest.NewServer(s)
	t.Cleanup(server.Close)
	s.URL = server.URL
	return s
}

// SetDown has it answer each request by status 503, or no more.
func (s *StandIn) SetDown(down bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.down = down
}

// SetInstead has an object be another one after so many more reads of parts of it.
func (s *StandIn) SetInstead(name string, reads int, p []byte) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.instead = func(read string) {
		if read != name {
			return
		}
		if reads--; reads == 0 {
			s.objects[name] = p
		}
	}
}

// Counts are how many parts of objects were read and written.
func (s *StandIn) Counts() (ranges, parts int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.ranges, s.parts
}

func fail(w http.ResponseWriter, status int, code string) {
	w.WriteHeader(status)
	fmt.Fprintf(w, "<Error><Code>%s</Code></Error>", code)
}

// ServeHTTP implements http.Handler: https://docs.aws.amazon.com/AmazonS3/latest/API.
func (s *StandIn) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	s.mu.Lock()
	defer s.mu.Unlock()
	bucket, name, _ := strings.Cut(strings.TrimPrefix(r.URL.Path, "/"), "/")
	q := r.URL.Query()
	switch {
	case s.down:
		fail(w, http.StatusServiceUnavailable, "SlowDown")
	case bucket != Bucket:
		fail(w, http.StatusNotFound, "NoSuchBucket")
	case name == "" && q.Has("uploads"):
		fmt.Fprint(w, "<ListMultipartUploadsResult></ListMultipartUploadsResult>")
	case name == "":
		s.list(w, q.Get("prefix"), q.Get("continuation-token"))
	case r.Method == http.MethodPost && q.Has("uploads"):
		id := strconv.Itoa(len(s.uploads) + 1)
		s.uploads[id] = map[int][]byte{}
		fmt.Fprintf(w, "<InitiateMultipartUploadResult><UploadId>%s</UploadId>"+
			"</InitiateMultipartUploadResult>", id)
	case r.Method == http.MethodPost:
		var all []byte
		parts := s.uploads[q.Get("uploadId")]
		for n := 1; n <= len(parts); n++ {
			all = append(all, parts[n]...)
		}
		s.objects[name] = all
		fmt.Fprintf(w, "<CompleteMultipartUploadResult><Bucket>%s</Bucket><Key>%s</Key>"+
			"<ETag>\"x\"</ETag></CompleteMultipartUploadResult>", Bucket, name)
	case r.Method == http.MethodPut:
		p, err := readBody(r)
		if err != nil {
			fail(w, http.StatusBadRequest, "IncompleteBody")
			return
		}
		if id := q.Get("uploadId"); id != "" {
			n, _ := strconv.Atoi(q.Get("partNumber"))
			s.uploads[id][n] = p
			s.parts++
		} else {
			s.objects[name] = p
		}
		w.Header().Set("ETag", etag(p))
	case r.Method == http.MethodDelete:
		delete(s.objects, name)
		w.WriteHeader(http.StatusNoContent)
	default:
		p, ok := s.objects[name]
		if !ok {
			fail(w, http.StatusNotFound, "NoSuchKey")
			return
		}
		if r.Header.Get("Range") != "" {
			s.ranges++
		}
		w.Header().Set("ETag", etag(p))
		http.ServeContent(w, r, "", time.Unix(1e9, 0), bytes.NewReader(p))
		if s.instead != nil {
			s.instead(name)
		}
	}
}

func etag(p []byte) string { return fmt.Sprintf(`"%x"`, md5.Sum(p)) }

// pageMax is the most objects of an answer to a list.
const pageMax = 7

func (s *StandIn) list(w http.ResponseWriter, prefix, after string) {
	type content struct {
		Key, LastModified, ETag string
		Size                    int
	}
	var list []content
	for name, p := range s.objects {
		if strings.HasPrefix(name, prefix) && name > after {
			list = append(list, content{name, time.Now().UTC().Format(time.RFC3339), etag(p),
				len(p)})
		}
	}
	slices.SortFunc(list, func(a, b content) int { return strings.Compare(a.Key, b.Key) })
	answer := struct {
		XMLName               xml.Name `xml:"ListBucketResult"`
		Name                  string
		IsTruncated           bool
		NextContinuationToken string
		Contents              []content
	}{Name: Bucket, Contents: list}
	if len(list) > pageMax {
		answer.IsTruncated, answer.Contents = true, list[:pageMax]
		answer.NextContinuationToken = list[pageMax-1].Key
	}
	_ = xml.NewEncoder(w).Encode(answer)
}

// readBody reads a body, which may come in chunks with a signature each.
func readBody(r *http.Request) ([]byte, error) {
	p, err := io.ReadAll(r.Body)
	if err != nil || !strings.HasPrefix(r.Header.Get("X-Amz-Content-Sha256"), "STREAMING-") {
		return p, err
	}
	var all []byte
	for {
		line, rest, ok := bytes.Cut(p, []byte("\r\n"))
		size, _, _ := strings.Cut(string(line), ";")
		n, err := strconv.ParseUint(size, 16, 32)
		if !ok || err != nil || uint64(len(rest)) < n {
			return nil, io.ErrUnexpectedEOF
		}
		if n == 0 {
			return all, nil
		}
		all = append(all, rest[:n]...)
		p = bytes.TrimPrefix(rest[n:], []byte("\r\n"))
	}
}
