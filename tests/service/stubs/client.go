// Streams a chat, cancels a request, and reads why a request was refused.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"os"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	pb "example.com/chat/gen/penstock/v1"
)

func main() {
	// Over TLS: grpc.WithTransportCredentials(credentials.NewTLS(nil)). From grpc-go 1.63 on: grpc.NewClient.
	channel, err := grpc.Dial(os.Args[1], grpc.WithInsecure())
	if err != nil {
		log.Fatal(err)
	}
	defer channel.Close()
	client := pb.NewGenerationServiceClient(channel)
	for _, call := range []func(context.Context, pb.GenerationServiceClient) error{chat, cancel, refused} {
		ctx, end := context.WithCancel(context.Background())
		if err := call(ctx, client); err != nil {
			log.Fatal(err)
		}
		end() // ends what is left of the call, and its requests
	}
}

func ask(question string) *pb.GenerationStart_Chat {
	message := &pb.ChatMessage{Role: "user", Content: proto.String(question)}
	return &pb.GenerationStart_Chat{Chat: &pb.Chat{Messages: []*pb.ChatMessage{message}}}
}

// chat prints an answer as it comes.
func chat(ctx context.Context, client pb.GenerationServiceClient) error {
	start := &pb.GenerationStart{
		Prompt:   ask("What does a kernel do?"),
		Sampling: &pb.SamplingParams{MaxTokens: proto.Uint32(40)},
	}
	answer, err := client.GenerateOne(ctx, &pb.GenerateOneRequest{Start: start})
	if err != nil {
		return err
	}
	fmt.Print("answer: ")
	for {
		response, err := answer.Recv()
		if errors.Is(err, io.EOF) {
			fmt.Println()
			return nil
		}
		if err != nil {
			return err
		}
		for _, delta := range response.Deltas {
			fmt.Print(delta.Text)
		}
	}
}

// cancel ends one request of a stream, which may carry many, after its first text.
func cancel(ctx context.Context, client pb.GenerationServiceClient) error {
	stream, err := client.Generate(ctx)
	if err != nil {
		return err
	}
	start := &pb.GenerationStart{Ref: 1, Prompt: ask("Count to a million.")}
	if err := stream.Send(&pb.GenerateRequest{Frame: &pb.GenerateRequest_Start{Start: start}}); err != nil {
		return err
	}
	for cancelled := false; ; {
		response, err := stream.Recv()
		if err != nil {
			return err
		}
		for _, finished := range response.Finished {
			code := status.FromProto(finished.Status).Code()
			fmt.Printf("request %d: %v after %d tokens\n", finished.Ref, code, finished.Usage.OutputTokens)
			return stream.CloseSend()
		}
		if len(response.Deltas) > 0 && !cancelled {
			cancelled = true
			frame := &pb.GenerateRequest_Cancel{Cancel: &pb.GenerationCancel{Refs: []uint32{1}}}
			if err := stream.Send(&pb.GenerateRequest{Frame: frame}); err != nil {
				return err
			}
		}
	}
}

// refused sends a request without a prompt, and prints the details of its status.
func refused(ctx context.Context, client pb.GenerationServiceClient) error {
	answer, err := client.GenerateOne(ctx, &pb.GenerateOneRequest{Start: &pb.GenerationStart{}})
	if err != nil {
		return err
	}
	_, err = answer.Recv()
	failure := status.Convert(err)
	fmt.Printf("refused: %v, %s\n", failure.Code(), failure.Message())
	for _, detail := range failure.Details() {
		switch detail := detail.(type) {
		case *errdetails.ErrorInfo:
			fmt.Printf("reason: %s of %s\n", detail.Reason, detail.Domain)
		case *errdetails.BadRequest:
			for _, violation := range detail.FieldViolations {
				fmt.Printf("field: %s\n", violation.Field)
			}
		}
	}
	return nil
}
